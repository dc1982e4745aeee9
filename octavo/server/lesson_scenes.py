"""The lesson as data: scenes that the real engine plays in a tiny pool (`octavo serve --lesson`), each told in two sentences.

A scene is some requests. A prompt is made of texts cut, or repeated, to so many tokens, so that it means the same for every model; a
request begins at once, or when an earlier one of the scene has so many tokens of its answer. `shows` names the events that must be seen,
or it is not the scene it says it is. To add one, add it here.
"""

from dataclasses import dataclass

END = 10_000  # more tokens than any answer here has: when it has ended


@dataclass(frozen=True, slots=True)
class Part:
    """One request."""

    prompt: tuple[tuple[str, int], ...]  # texts, each with its number of tokens
    answer: int  # tokens
    samples: int = 1
    after: tuple[int, int] | None = None  # which part before it, and how many tokens of its answer


@dataclass(frozen=True, slots=True)
class Scene:
    title: str
    text: str
    parts: tuple[Part, ...]
    shows: frozenset[str]


RABBIT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do. "
FALL = "Down, down, down. Would the fall never come to an end? I wonder how many miles I have fallen by this time, she said aloud. "
BOTTLE = "This bottle was not marked poison, so Alice ventured to taste it, and finding it very nice, she very soon finished it off. "
POOL = "She was in the pool of tears which she had wept when she was nine feet high, and swam about, trying to find her way out. "
CAT = "The Cat only grinned when it saw Alice. It looked good-natured, she thought: still it had very long claws and many teeth. "
TEA = "There was a table set out under a tree in front of the house, and the March Hare and the Hatter were having tea at it. "
QUEEN = "The players all played at once without waiting for turns, quarrelling all the while, and fighting for the hedgehogs. "
TRIAL = "The King and Queen of Hearts were seated on their throne when they arrived, with a great crowd assembled about them. "

SCENES = (
    Scene(
        "Blocks fill",
        "A prompt of 40 tokens takes three blocks of 16, and only the last of them is not full: more is never wasted. "
        "Nothing else is set aside for it, however long its answer may become.",
        (Part(((RABBIT, 40),), 6),),
        frozenset({"admit"}),
    ),
    Scene(
        "A block boundary",
        "Each token of the answer goes into the next slot of the last block. "
        "When that is full any free block will do, for the block table says where each one lies.",
        (Part(((FALL, 44),), 24),),
        frozenset({"admit"}),
    ),
    Scene(
        "A prefix is found again",
        "A full block is sealed, and known by a digest of its tokens and of all that came before them. "
        "The second request begins with the same 64 tokens: it finds their blocks and computes only what follows.",
        (Part(((BOTTLE, 64), (CAT, 8)), 4), Part(((BOTTLE, 64), (TEA, 12)), 8, after=(0, END))),
        frozenset({"admit", "hit"}),
    ),
    Scene(
        "A burst with one prefix",
        "Four requests arrive together, all with the same 80 tokens in front. "
        "One computes them while the others wait for its blocks; then all four hold the same five, and answer in blocks of their own.",
        tuple(Part(((POOL, 80), (text, 8)), 12) for text in (RABBIT, FALL, CAT, TEA)),
        frozenset({"admit", "hit"}),
    ),
    Scene(
        "Samples part by copy-on-write",
        "One prompt, three answers: all three hold the prompt's blocks, even the last, which is not full. "
        "Whoever writes into it gets a copy of his own, and the last one left writes in place.",
        (Part(((CAT, 40),), 16, samples=3),),
        frozenset({"admit", "fork", "copy"}),
    ),
    Scene(
        "Preempted, and back again",
        "Three answers grow until no block is free, and the youngest request gives its blocks back and waits. "
        "When there is room again it returns, finds what the cache still has of it, and computes the rest anew.",
        tuple(Part(((text, 112),), 72) for text in (TEA, QUEEN, TRIAL)),
        frozenset({"admit", "preempt", "evict"}),
    ),
    Scene(
        "What is cached is evicted",
        "Blocks that nobody holds stay cached until somebody needs the room; those unused for longest go first, ends before beginnings. "
        "The last request asks for the first one's prompt again, and only its beginning is still there.",
        (
            Part(((RABBIT, 96),), 3),
            *(Part(((text, 96),), 3, after=(number, END)) for number, text in enumerate((FALL, BOTTLE, POOL, CAT, TEA, RABBIT))),
        ),
        frozenset({"admit", "evict", "hit"}),
    ),
    Scene(
        "A long prompt beside an answer",
        "A prompt of 200 tokens is computed in pieces, for a step takes 48 tokens at most. "
        "The answer beside it gets its token in every step: nobody stands still while somebody reads.",
        (Part(((QUEEN, 20),), 40), Part(((TRIAL, 200),), 8, after=(0, 5))),
        frozenset({"admit"}),
    ),
)
