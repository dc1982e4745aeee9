"""llama.cpp's converter, for a tiny model with a tokenizer of its own. Its first argument is llama.cpp's source, the others are its own.

The converter knows tokenizers by a hash of what they make of a text. It is told that ours splits words as GPT-2's does. The rest is
untouched: names, keys, permutations and folded norms are the converter's.
"""

import sys
from pathlib import Path


def main() -> None:
    source, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, source)
    del sys.argv[1]
    import convert_hf_to_gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel

    architecture = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    get_model_class(architecture).set_vocab = TextModel._set_vocab_gpt2
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
