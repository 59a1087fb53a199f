"""The part of the build that pyproject.toml cannot express: ``config/`` goes inside the package."""

from setuptools import find_packages, setup

YAML = "torchrl_grpo.config.yaml"  # read by torchrl_grpo/runtime/config_dir.py

setup(
    packages=[*find_packages(include=["torchrl_grpo", "torchrl_grpo.*"]), YAML],
    package_dir={YAML: "config"},
    package_data={YAML: ["*.yaml", "*/*.yaml"], "torchrl_grpo": ["py.typed"]},
    include_package_data=False,
)
