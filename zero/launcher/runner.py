"""DeepSpeed's `deepspeed.launcher.runner`."""

import os

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME"]

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""The file of environment variables that `onebit launch` reads, too."""
