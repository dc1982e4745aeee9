"""The lesson as data: scenes that the real engine plays in a tiny pool (`octavo serve --lesson`), each with a short caption.

A scene is a few requests. A prompt is made of texts, each cut or repeated to a number of tokens, so that a scene is the same for every
model. A request starts at once, or when an earlier one of the scene has so many tokens of its answer. `marks` are the marks in the picture
that the page explains beside the caption (octavo/web/lesson_marks.js draws them). `shows` are the events that have to happen in the scene.
To add a scene, add it here.
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
    text: str  # two or three sentences: what happens, and what to look at
    marks: tuple[str, ...]
    parts: tuple[Part, ...]
    shows: frozenset[str]

    @property
    def caption(self) -> dict[str, object]:
        """What the page says about it."""
        return {"title": self.title, "text": self.text, "marks": self.marks}


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
        "A prompt takes blocks",
        "A prompt of 40 tokens arrives and takes three blocks of 16 tokens. Look at the third block: it is only half full, and the answer "
        "is written into it. No other memory is reserved for the answer.",
        ("held", "fill", "sealed"),
        (Part(((RABBIT, 40),), 8),),
        frozenset({"admit"}),
    ),
    Scene(
        "The answer needs a new block",
        "Every new token of the answer goes into the last block. Watch that block: when it is full, the sequence takes another free block. "
        "The block table keeps the order, so any free block will do.",
        ("held", "write"),
        (Part(((FALL, 44),), 24),),
        frozenset({"admit"}),
    ),
    Scene(
        "A prefix is found in the cache",
        "The first request ends, and its full blocks stay in the cache. The second request begins with the same 64 tokens. "
        "Look at the framed blocks: it takes these four from the cache and computes only the rest of its prompt.",
        ("cached", "hit"),
        (Part(((BOTTLE, 64), (CAT, 8)), 6), Part(((BOTTLE, 64), (TEA, 12)), 10, after=(0, END))),
        frozenset({"admit", "hit"}),
    ),
    Scene(
        "Four requests share a prefix",
        "Four requests arrive together, and all begin with the same 80 tokens. The first one computes them while the others wait. "
        "Look for the number 4: all four share the same five blocks, and each writes its answer into blocks of its own.",
        ("shared", "held"),
        tuple(Part(((POOL, 80), (text, 8)), answer) for text, answer in ((RABBIT, 15), (FALL, 14), (CAT, 14), (TEA, 14))),  # end together
        frozenset({"admit", "hit"}),
    ),
    Scene(
        "Three answers to one prompt: copy-on-write",
        "One prompt gets three answers, and at first all three share its blocks, even the half full one at the end. Look for the arrows: "
        "a sequence gets a copy before it writes into a shared block. The last one left writes into the block itself.",
        ("shared", "copy"),
        (Part(((CAT, 40),), 16, samples=3),),
        frozenset({"admit", "fork", "copy"}),
    ),
    Scene(
        "No block is free: preemption",
        "Three answers grow until no block is free. The youngest request then gives its blocks back and waits. "
        "When there is room again it takes from the cache what is still there, and computes the rest again.",
        ("preempt", "evict", "hit"),
        tuple(Part(((text, 144),), 40) for text in (TEA, QUEEN, TRIAL)),
        frozenset({"admit", "preempt", "evict"}),
    ),
    Scene(
        "Old blocks are evicted",
        "Blocks that nobody uses stay cached until the room is needed. Look for the crosses: the blocks unused for longest are evicted "
        "first. The last request repeats the first prompt, and only the beginning of it is still cached.",
        ("cached", "evict", "hit"),
        (
            Part(((RABBIT, 96),), 3),
            *(Part(((text, 96),), 3, after=(number, END)) for number, text in enumerate((FALL, BOTTLE, POOL, CAT, TEA, RABBIT))),
        ),
        frozenset({"admit", "evict", "hit"}),
    ),
    Scene(
        "A long prompt beside an answer",
        "A prompt of 200 tokens arrives while an answer is being written. A step computes at most 48 tokens, so the prompt takes five "
        "steps. Watch both letters: the prompt fills three blocks in a step, and the answer still gets its token.",
        ("write", "prefill", "decode"),
        (Part(((QUEEN, 20),), 30), Part(((TRIAL, 200),), 18, after=(0, 8))),
        frozenset({"admit"}),
    ),
)
