"""What ranks compare at construction; pyproject.toml reads it too."""

VERSION = "0.2.0"
