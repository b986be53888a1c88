"""Shapes of parameter leaves that the benchmarks use."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class LeafSet:
    """A named list of leaf shapes, all of them parameters of one step."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def parameters(self) -> int:
        """The number of parameters in all leaves."""
        return sum(map(math.prod, self.shapes))

    def shrunk(self, scale: int) -> "LeafSet":
        """Return a set with every axis divided by ``scale``, but at least 1."""
        shapes = (tuple(max(1, n // scale) for n in shape) for shape in self.shapes)
        return LeafSet(self.name, tuple(shapes))


def gpt2(width: int = 768, layers: int = 12) -> LeafSet:
    """Return GPT-2 124M: 148 leaves and 124,439,808 parameters, with a tied head."""
    norm = ((width,), (width,))
    block = (
        *norm,
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        *norm,
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    )
    return LeafSet("gpt2", ((50257, width), (1024, width), *block * layers, *norm))


def llama_7b() -> LeafSet:
    """Return Llama 7B: 291 leaves, 6,738,415,616 parameters."""
    width, inner, words = 4096, 11008, 32000
    attention = ((width, width),) * 4
    block = (*attention, *((width, inner),) * 2, (inner, width), (width,), (width,))
    return LeafSet("llama-7b", ((words, width), *block * 32, (width,), (width, words)))


def resnet50() -> LeafSet:
    """Return ResNet-50 for ImageNet: 161 leaves, 25,557,032 parameters."""
    shapes, into = [(7, 7, 3, 64), (64,), (64,)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            convolutions = [(1, 1, into, width), (3, 3, width, width)]
            convolutions += [(1, 1, width, 4 * width)]
            convolutions += [(1, 1, into, 4 * width)] if block == 0 else []
            for shape in convolutions:
                shapes += [shape, shape[-1:], shape[-1:]]
            into = 4 * width
    return LeafSet("resnet50", (*shapes, (2048, 1000), (1000,)))
