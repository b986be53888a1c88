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


def resnet18(width: int = 64, classes: int = 1000) -> LeafSet:
    """Return ResNet-18 for ImageNet: 62 leaves, 11,689,512 parameters."""
    shapes = [(7, 7, 3, width), (width,), (width,)]
    into = width
    for stage in range(4):
        out = width << stage
        for block in range(2):
            shapes += [(3, 3, into, out), (out,), (out,)]
            shapes += [(3, 3, out, out), (out,), (out,)]
            if block == 0 and into != out:
                shapes += [(1, 1, into, out), (out,), (out,)]
            into = out
    return LeafSet("resnet18", (*shapes, (into, classes), (classes,)))


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


def vit_base(width: int = 768, layers: int = 12) -> LeafSet:
    """Return ViT-B/16: 200 leaves, 86,567,656 parameters."""
    projections = ((width, 12, 64), (12, 64)) * 3
    block = (
        *((width,), (width,)),
        *(*projections, (12, 64, width), (width,)),
        *((width,), (width,)),
        *((width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    )
    shapes = (
        *((1, 1, width), (1, 197, width), (16, 16, 3, width), (width,)),
        *block * layers,
        *((width,), (width,), (width, 1000), (1000,)),
    )
    return LeafSet("vit_base", shapes)


def small_leaves() -> LeafSet:
    """Return 150 leaves of ten shapes (64 to 16,384 elements): 938,880 parameters."""
    some = ((64, 128), (128,), (128, 64), (64,), (96, 96))
    others = ((64, 256), (256,), (192, 64), (192,), (80, 96))
    return LeafSet("150 small leaves", (*some, *others) * 15)
