"""`octavo run`: another name of `octavo chat`, which users of ollama know."""

from octavo.cli.chat import add_arguments, run

__all__ = ["add_arguments", "run"]
