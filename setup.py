"""The part of the build that pyproject.toml cannot express: ``config/`` goes inside the package."""

from setuptools import find_packages, setup

# torchrl_grpo/runtime/config_dir.py reads it.
YAML = "torchrl_grpo.config.yaml"

setup(
    packages=[*find_packages(include=["torchrl_grpo", "torchrl_grpo.*"]), YAML],
    package_dir={YAML: "config"},
    package_data={
        YAML: ["*.yaml", "*/*.yaml"],
        "torchrl_grpo": ["py.typed"],
        "torchrl_grpo.config": ["other_systems.tsv"],
        "torchrl_grpo.slurm": ["*.jinja"],
        "torchrl_grpo.report": ["page/*"],
    },
    include_package_data=False,
)
