"""The GPU memory that the engine needs besides the KV pool, computed from shapes as `native_size.py` does for the CPU.

    weights    quantised weights stay quantised, in 16-bit words, with spans of 32 columns interleaved; 8-bit floats stay 8-bit floats,
               with scales in float32; floats have the dtype of the run
    a step     the logits of all rows; the residual stream and the largest part of a layer, or the sampler's tensors
    graphs     the memory that captured steps hold: measured on an H200
    rows       an array of words for each (`step/step_tensors.py`), the tensors of the step, the rotation tables

Nothing depends on the context length: attention gathers no keys, and builds masks only inside its tiles.
"""

from collections.abc import Mapping

from octavo.attention.mixer import StepLoad
from octavo.layout import ENTRY_WORDS, LENGTH_WORDS, MAX_SPAN, ROW_HEAD, SLAB, SLOT_WORDS, TEAM_ENTRY, TEAM_LINE, TOKEN_WORDS, WORD_BITS
from octavo.models.description import LayerShape, Matrix, ModelDescription
from octavo.sizing.activations import FLOAT32
from octavo.sizing.model_size import SCALE_AND_OFFSET, Codes, Kept, kept_matrices

MIB = 2**20
CONTEXT = 520 * MIB  # of a process, once CUDA has started
GPU_LIBRARIES = 160 * MIB  # compiled kernels, and the workspaces of cuBLAS: allocated while the engine starts
FLASHINFER = 144 * MIB  # its workspaces, for a step with two kinds of layers
WORD = 4  # bytes
ADJUSTED_LOGITS = 2**24  # at once, when penalties apply
ADJUSTED = 2 * FLOAT32  # bytes for each: the score, and the count of the token in the row
LAUNCHED = 10**13  # parameters * tokens: a larger step takes longer to compute than to launch kernel by kernel (30 ms on an H200)
MOST_CAPTURED = 8192  # tokens
GRAPHS = 72  # the number of captured shapes, for 512 rows
KERNELS = 8  # of a layer, in a graph
KERNEL_BYTES = 16 * 2**10  # that a graph holds for each kernel
DECODED, MIXED, LARGE = 24, 9216, 12288  # tokens of all graphs: decode graphs, per row; mixed ones up to 2,048; mixed ones beyond


def gpu_matrices(model: ModelDescription, item: int, stored: Mapping[str, Codes | None]) -> list[Kept]:
    """Returns how each matrix is stored. `item`: bytes of a float; `stored`: the storage format of each weight, by name"""
    return kept_matrices(model, stored, lambda matrix, codes: _matrix_bytes(matrix, codes, item))


def gpu_weight_bytes(model: ModelDescription, item: int, stored: Mapping[str, Codes | None]) -> int:
    embedding = 0 if model.lookup is None else model.lookup.numbers
    vectors = model.vector_numbers * item + model.wide_numbers * (FLOAT32 - item)
    return sum(one.nbytes for one in gpu_matrices(model, item, stored)) + vectors + embedding * item


def gpu_slab_bytes(model: ModelDescription, item: int, stored: Mapping[str, Codes | None]) -> int:
    sizes = [one.matrix.numbers for one in gpu_matrices(model, item, stored) if one.codes is not None and not one.codes.fp8_span]
    return min(max(sizes, default=0), SLAB) * item


def gpu_step_bytes(model: ModelDescription, item: int, load: StepLoad) -> int:
    """Returns the peak bytes of a step: logits of all rows, and either layers or sampling. `item`: bytes of a float of the run"""
    logits, adjusted = load.rows * model.vocab_size, min(load.rows, max(ADJUSTED_LOGITS // model.vocab_size, 1)) * model.vocab_size
    return logits * item + max(_layer_bytes(model, item, load), adjusted * ADJUSTED, logits * item)  # filtered logits, a separate copy


def graph_refusal(model: ModelDescription) -> str | None:
    """Returns why steps of this model cannot be captured as CUDA graphs, or None."""
    if model.shares_context:
        return "ranks that share a context communicate in every layer"
    return None if model.captured else f"the {model.family} family does not say that its steps can be captured"


def captured_tokens(model: ModelDescription) -> int:
    """Returns the tokens of the largest captured step. Padding a larger step would take longer than launching its kernels."""
    return min(LAUNCHED // model.num_parameters, MOST_CAPTURED)


def gpu_graph_bytes(model: ModelDescription, item: int, load: StepLoad) -> int:
    """Returns the bytes of all graphs. They share the memory of the largest step; each has its own kernels and last hidden states."""
    captured = captured_tokens(model)
    largest = StepLoad(min(load.tokens, max(captured, load.rows)), load.rows, load.context, load.gathered)
    hidden = load.rows * DECODED + MIXED + (LARGE if captured >= load.tokens else 0)
    return _layer_bytes(model, item, largest) + hidden * model.hidden_size * item + GRAPHS * len(model.layers) * KERNELS * KERNEL_BYTES


def gpu_row_bytes(model: ModelDescription, rows: int, tokens: int, max_len: int, groups: int, max_blocks: int) -> int:
    """Returns the bytes of the rows, of the largest step built from them, and of the rotation tables.

    `tokens`: of a step. `groups`: cache groups. `max_blocks`: of a block table
    """
    tables = groups * max_blocks
    step = rows * (tables + ENTRY_WORDS + groups * LENGTH_WORDS) + tokens * (TOKEN_WORDS + groups * SLOT_WORDS)
    teams = groups * rows * (TEAM_ENTRY + TEAM_LINE)
    return (rows * (ROW_HEAD + tables + max_len) + step + teams) * WORD + max_len * model.position_numbers * FLOAT32


def _layer_bytes(model: ModelDescription, item: int, load: StepLoad) -> int:
    """Returns the peak bytes of a layer of any kind."""
    return max(_of_layer(layer, model.hidden_size, item, load) for layer in model.kinds)


def _of_layer(layer: LayerShape, hidden: int, item: int, load: StepLoad) -> int:
    mixer, mlp = layer.mixer.gpu_token_numbers, layer.mlp.gpu_token_numbers
    if layer.mlp.experts is not None:
        mlp += layer.mlp.experts.chosen * hidden  # the result of each choice
    stream = 2 * hidden  # input and sum; twice that if a norm allocates new ones
    token = stream + max(mixer, mlp + hidden if layer.parallel else mlp, stream)
    return load.tokens * token * item + layer.mixer.gpu_step_bytes(load.rows)


def _matrix_bytes(matrix: Matrix, codes: Codes | None, item: int) -> int:
    bias = matrix.rows * item if matrix.bias else 0
    if codes is None:
        return matrix.rows * matrix.columns * item + bias
    if codes.fp8_span:
        scales = matrix.rows if codes.fp8_span == matrix.columns else matrix.numbers // codes.fp8_span**2
        return matrix.numbers + scales * FLOAT32 + bias
    block = WORD_BITS // codes.bits * min(codes.group, MAX_SPAN)
    columns = -(-matrix.columns // block) * block  # padded
    groups = -(-columns // codes.group)
    order = matrix.columns * 2 * WORD if codes.order else 0
    return matrix.rows * (columns * codes.bits // 8 + groups * SCALE_AND_OFFSET) + order + bias
