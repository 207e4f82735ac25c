"""Make language models smaller and faster, with proof."""

__version__ = "0.1.0"
