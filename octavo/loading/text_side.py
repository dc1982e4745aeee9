"""The text side of a model: its config, tokenizer and sampling defaults. No weight is read and torch is not imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from octavo.config import EngineConfig
from octavo.loading.files import missing_parts, no_model_folder
from octavo.loading.names import default_model
from octavo.loading.resolve import ModelSource, load_model_config, read_generation_config, source_of
from octavo.log import Stopwatch, logger
from octavo.model_config import ModelConfig
from octavo.text.prompt import PromptEncoder
from octavo.text.tokenizer import Tokenizer

# SmolLM2 rambles at temperature 1; its GGUF file has no place for what its makers recommend.
DEFAULT_MODEL_SAMPLING: Mapping[str, object] = {"temperature": 0.2, "top_p": 0.9}


@dataclass(frozen=True, slots=True)
class TextSide:
    source: ModelSource
    model: ModelConfig  # with the end ids that the tokenizer knows of
    tokenizer: Tokenizer | None  # None where skip_tokenizer_init is set
    encoder: PromptEncoder
    sampling_defaults: Mapping[str, object]

    @property
    def is_default_model(self) -> bool:
        return _is_default(self.source)

    @property
    def give_tokenizer(self) -> Callable[[], Tokenizer] | None:
        """A function that gives the tokenizer to an engine in the same process, when the first grammar comes."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else lambda: tokenizer


def open_text_side(config: EngineConfig) -> TextSide:
    watch = Stopwatch()
    source = source_of(config)
    model = load_model_config(source)
    logger.info("Reading the config took %.2f seconds (%s)", watch.total(), source.name)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(source)
    if tokenizer is not None:
        tokenizer.check_fits(model.vocab_size)
        model = replace(model, eos_token_ids=tuple(dict.fromkeys(model.eos_token_ids + tokenizer.eos_token_ids)))
    return TextSide(source, model, tokenizer, PromptEncoder(tokenizer, config.chat_template), _sampling_defaults(config, source))


def load_tokenizer(source: ModelSource) -> Tokenizer:
    watch = Stopwatch()
    if source.kind == "gguf":
        tokenizer = Tokenizer.from_gguf(source.gguf.metadata, str(source.path))
    else:
        if any("tokenizer" in name for name in missing_parts(source.path)):
            raise no_model_folder(source.path)
        tokenizer = Tokenizer.from_folder(source.path)
    logger.info("Tokenizer loading took %.2f seconds", watch.total())
    return tokenizer


def _is_default(source: ModelSource) -> bool:
    """Whether this is the file of the default model, whatever a user calls it. Further API processes know its path alone."""
    return source.kind == "gguf" and source.path == default_model()


def _sampling_defaults(config: EngineConfig, source: ModelSource) -> Mapping[str, object]:
    """Returns what the model's makers recommend, unless the user turned that off."""
    if config.generation_config == "none":
        return {}
    if _is_default(source):
        sampling, where = DEFAULT_MODEL_SAMPLING, "the default model's card"
    elif source.kind == "gguf":
        return {}
    else:
        sampling, where = read_generation_config(source.path).sampling, "generation_config.json"
    if sampling:
        shown = ", ".join(f"{name}={value}" for name, value in sampling.items())
        logger.info("Sampling defaults from %s: %s (generation_config=none turns them off)", where, shown)
    return sampling
