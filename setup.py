"""The part of the build that pyproject.toml cannot express: ``config/`` and a page go inside the package."""

from setuptools import find_packages, setup

# Both are read by torchrl_grpo/runtime/config_dir.py.
YAML, PAGES = "torchrl_grpo.config.yaml", "torchrl_grpo.config.pages"

setup(
    packages=[*find_packages(include=["torchrl_grpo", "torchrl_grpo.*"]), YAML, PAGES],
    package_dir={YAML: "config", PAGES: "docs"},
    package_data={
        YAML: ["*.yaml", "*/*.yaml"],
        PAGES: ["coming_from.md"],
        "torchrl_grpo": ["py.typed"],
        "torchrl_grpo.slurm": ["*.jinja"],
    },
    include_package_data=False,
)
