"""Names on the hub and the files behind them, without any hub."""

import pytest

from octavo.errors import ConfigError, LoadError
from octavo.loading.names import HubName, at_revision, choose_gguf, choose_texts, choose_weights, parse_hub_name

REPO = HubName("o/n")


# promise: among-these-order
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("o/n@main", HubName("o/n", "main")),
        ("o/n@refs/pr/3", HubName("o/n", "refs/pr/3")),
        ("o/n:Q4_K_M", HubName("o/n", None, "Q4_K_M")),
        ("o/n@v1.0:q8_0", HubName("o/n", "v1.0", "q8_0")),
        ("o/n:some-file.gguf", HubName("o/n", None, "some-file.gguf")),
    ],
)
def test_names_are_read(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name


@pytest.mark.parametrize(
    "text",
    ["", "n", "a/b/c", "/o/n", "./n", "../n", "~/n", "o/", "o/n@", "o/n:", "o/n:a/b", "o/n@a@b", "o/n:a:b", "o/n:Q8_0@main", "o/n m",
     "o--x/n", "o/..", "o/n..m", "-o/n", "o/n.git", "https://huggingface.co/o/n", "models/m.gguf", "o/n@../../x", "o/n@/x", "o/n@a//b",
     "o/n\n", "ö/n", "o/n@a/../../x", "o/n@" + 201 * "x"],
)  # fmt: skip
def test_what_is_no_name_is_none(text: str) -> None:
    assert parse_hub_name(text) is None


def test_a_revision_is_given_once() -> None:
    assert at_revision(HubName("o/n", quant="Q8_0"), "v1") == HubName("o/n", "v1", "Q8_0")
    assert at_revision(HubName("o/n", "v1"), "v1") == at_revision(HubName("o/n", "v1"), None) == HubName("o/n", "v1")
    with pytest.raises(ConfigError, match="o/n names revision 'v1', but the setting revision is 'v2'"):
        at_revision(HubName("o/n", "v1"), "v2")
    with pytest.raises(ConfigError, match="revision must be a branch, a tag or a commit"):
        at_revision(HubName("o/n"), "../../etc")


SPLIT = ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]
GGUFS = ["README.md", "m-Q4_K_M.gguf", "m.Q8_0.gguf", "m-UD-Q4_K_XL.gguf", "mmproj-F16.gguf", *SPLIT]


# promise: model-owner-name-q4
def test_a_gguf_file_is_chosen_by_its_kind_or_its_name() -> None:
    for quant, file in (("q4_k_m", "m-Q4_K_M.gguf"), ("Q8_0", "m.Q8_0.gguf"), ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"), ("m.Q8_0.gguf",) * 2):
        assert choose_gguf(HubName("o/n", quant=quant), GGUFS) == file
    assert choose_gguf(HubName("o/n", quant="Q8_0"), ["BF16/m-BF16.gguf", "Q8_0/m-Q8_0.gguf"]) == "Q8_0/m-Q8_0.gguf"
    assert choose_gguf(HubName("o/n", quant="Q8_0"), ["model.safetensors", "m-Q8_0.gguf"]) == "m-Q8_0.gguf"


def test_without_a_kind_it_is_safetensors_or_the_only_gguf_file() -> None:
    assert choose_gguf(REPO, ["model.safetensors", "m-Q8_0.gguf"]) is None
    assert choose_gguf(REPO, ["model.safetensors.index.json", "m-Q8_0.gguf", "m-Q4_0.gguf"]) is None
    assert choose_gguf(REPO, ["config.json", "mmproj-m-F16.gguf", "m.gguf", "pytorch_model.bin"]) == "m.gguf"


# promise: model-owner-name-q4
@pytest.mark.parametrize(
    ("quant", "files", "reason"),
    [
        (None, GGUFS, "o/n: has 3 GGUF files: name one, as in o/n:Q4_K_M; there are Q4_K_M, Q8_0, UD-Q4_K_XL$"),
        (None, SPLIT, r"only GGUF files split into parts \(F16\), which Octavo does not read; join them"),
        (None, ["config.json", "pytorch_model.bin"], "o/n: has only pickled weights, which can run code; .* convert"),
        (None, ["config.json", "consolidated.safetensors"], "has no model.safetensors, no model.safetensors.index.json and no GGUF"),
        (None, ["config.json", "original/model.safetensors"], "has no model.safetensors"),
        ("Q4_K_S", GGUFS, "o/n: has no GGUF file Q4_K_S; did you mean o/n:Q4_K_M[?]; there are Q4_K_M, Q8_0, UD-Q4_K_XL$"),
        ("nonsense", GGUFS, "has no GGUF file nonsense; there are Q4_K_M"),
        ("f16", GGUFS, "f16 is split into parts, which Octavo does not read; join them .*; there are Q4_K_M"),
        ("Q8_0", ["model.safetensors"], "has no GGUF file; for its safetensors leave :Q8_0 off"),
        ("Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0 could be a-Q8_0.gguf or b-Q8_0.gguf: name the file, as in o/n:a-Q8_0.gguf"),
    ],
)
def test_what_cannot_be_chosen_says_what_can(quant: str | None, files: list[str], reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        choose_gguf(HubName("o/n", quant=quant), files)


# promise: downloads-take-only
def test_a_folder_is_what_its_index_names_and_nothing_that_could_run() -> None:
    texts = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model"]
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    others = ["README.md", "LICENSE.txt", "modeling_x.py", "pytorch_model.bin", "m.pt", "consolidated.safetensors", "onnx/config.json",
              "original/consolidated.safetensors", "m-Q8_0.gguf"]  # fmt: skip
    files = [*others, *weights, *texts]
    assert choose_texts(files) == texts
    assert choose_weights("o/n", files, {"a": weights[1], "b": weights[0], "c": weights[0]}) == weights
    assert choose_weights("o/n", files, None) == ["model.safetensors"]
    for shard in ("absent.safetensors", "../model.safetensors", "original/consolidated.safetensors", "pytorch_model.bin", "config.json"):
        with pytest.raises(LoadError, match=r"names .*, which is not a weight file of the repository"):
            choose_weights("o/n", files, {"a": shard})
