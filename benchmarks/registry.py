"""What there is to run: a line for each benchmark."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A module ``benchmarks.GROUP.NAME`` with a function ``main(argv)``.

    Attributes:
      group: the folder.
      summary: what it measures, in one line.
      minutes: of two CPU cores, without options.
      feeds: the pages, pictures and records that show its figures.
      needs: modules, beside the package's own requirements, that it cannot do without.
      has_full: whether ``--full`` asks for the paper's size, for a GPU.
      in_all: False where it takes hours without options, or a GPU; ``all`` leaves it
        out.
    """

    group: str
    summary: str
    minutes: float
    feeds: tuple[str, ...]
    needs: tuple[str, ...] = ()
    has_full: bool = False
    in_all: bool = True

    def module(self, name: str) -> str:
        """The module's full name."""
        return f"benchmarks.{self.group}.{name}"


GPU_COMPILER = ("jax_plugins.xla_cuda12",)
TRAINING = ("flax", "matplotlib", "orbax", "sklearn", "tqdm")

BENCHMARKS = {
    "gpu_program": Benchmark(
        "programs",
        "AdamW steps compiled for GPUs: bytes, kernels, instructions, registers",
        6,
        ("docs/compiled_programs.md",),
        GPU_COMPILER,
    ),
    "gpu_layouts": Benchmark(
        "programs",
        "the same of many leaves and shards, on 1, 8 and 256 devices",
        8,
        ("docs/compiled_programs.md",),
        GPU_COMPILER,
    ),
    "compile_cost": Benchmark(
        "programs",
        "seconds to trace and compile steps, beside optax, for CPUs and GPUs",
        6,
        ("docs/benchmarks.md",),
    ),
    "tpu_program": Benchmark(
        "programs",
        "AdamW steps compiled for TPUs: bytes, memory, copies, kernels",
        5,
        ("docs/compiled_programs.md",),
        ("libtpu",),
    ),
    "tpu_cycles": Benchmark(
        "programs",
        "scheduled cycles and vector operations of TPU kernels",
        1,
        ("docs/compiled_programs.md",),
        ("libtpu",),
    ),
    "tpu_layouts": Benchmark(
        "programs",
        "which leaves of whole models, on 1, 8 and 256 TPUs, have kernels",
        3,
        ("docs/compiled_programs.md",),
        ("libtpu",),
    ),
    "tpu_placed": Benchmark(
        "programs",
        "a step on sharded parameters, told where they lie and not, for four TPUs",
        2,
        ("docs/compiled_programs.md",),
        ("libtpu",),
    ),
    "release_memory": Benchmark(
        "programs",
        "memory of steps with and without gradient release, compiled for H200s",
        5,
        ("docs/ideas/release.md",),
        GPU_COMPILER,
    ),
    "large_models": Benchmark(
        "programs",
        "memory of Llama 3.1 8B's step, and the largest models that fit, compiled",
        40,
        ("docs/evidence.md", "docs/evidence/large_models.png"),
        (*GPU_COMPILER, "libtpu", "matplotlib"),
        in_all=False,
    ),
    "host_memory": Benchmark(
        "programs",
        "memory of released steps with the state in host memory, compiled for a TPU",
        6,
        ("docs/ideas/release.md",),
        ("libtpu",),
    ),
    "precision_memory": Benchmark(
        "programs",
        "memory of gradients by precision, compiled for an H200",
        2,
        ("docs/ideas/precision.md",),
        (*GPU_COMPILER, "flax"),
    ),
    "native_products": Benchmark(
        "programs",
        "which units multiply under precision assignments, compiled for an H200",
        10,
        ("docs/ideas/precision.md",),
        GPU_COMPILER,
    ),
    "step_time": Benchmark(
        "steps",
        "donated steps of every alias against optax; temporary memory",
        2,
        ("docs/benchmarks.md",),
    ),
    "release_time": Benchmark(
        "steps",
        "steps with and without gradient release",
        1,
        ("docs/ideas/release.md",),
    ),
    "first_device": Benchmark(
        "device",
        "on a GPU: bits of kernels, times of steps, GPT-2 124M, first compiles",
        8,
        ("docs/first_device.md",),
        in_all=False,
    ),
    "memory_profile": Benchmark(
        "papers",
        "Lewandowski, figure 2: memory of a step of 2e9 parameters, compiled",
        1,
        ("docs/evidence.md", "docs/evidence/memory_profile.png"),
        (*GPU_COMPILER, "matplotlib"),
        True,
    ),
    "t5_release": Benchmark(
        "papers",
        "Lewandowski, table 2: T5's architecture with gradient release, compiled",
        6,
        ("docs/evidence.md", "docs/evidence/t5_release.png"),
        (*GPU_COMPILER, "matplotlib"),
        True,
    ),
    "operator_bytes": Benchmark(
        "papers",
        "Lewandowski, figure 3: bytes of an addition by extra bits, compiled",
        1,
        ("docs/evidence.md", "docs/evidence/operator_bytes.png"),
        (*GPU_COMPILER, "matplotlib"),
        True,
    ),
    "forward_error": Benchmark(
        "papers",
        "Lewandowski, figure 6: error of split arithmetic by extra bits",
        1,
        ("docs/evidence.md", "docs/evidence/forward_error.png"),
        ("matplotlib",),
        True,
    ),
    "float8_weights": Benchmark(
        "papers",
        "Lewandowski, table 3: float8 weights by extra bits and rounding",
        6,
        ("docs/evidence.md", "docs/evidence/float8_weights.png"),
        ("matplotlib",),
        True,
    ),
    "float16_clicks": Benchmark(
        "papers",
        "Lewandowski, figure 4: a small DLRM in float16 with 8 extra bits",
        3,
        ("docs/evidence.md", "docs/evidence/float16_clicks.png"),
        ("matplotlib",),
        True,
    ),
    "digit_gan": Benchmark(
        "papers",
        "Lewandowski, figure 5: a small DCGAN in bfloat16 with 8 extra bits",
        5,
        ("docs/evidence.md", "docs/evidence/digit_gan.png"),
        ("matplotlib", "sklearn"),
        True,
    ),
    "least_squares": Benchmark(
        "papers",
        "Zamirai, figure 2: what each rounding of weights saturates at",
        1,
        ("docs/evidence.md", "docs/evidence/least_squares.png"),
        ("matplotlib",),
        True,
    ),
    "kahan_parts": Benchmark(
        "papers",
        "Zamirai, figure 5: Kahan summation for a part of the weights",
        2,
        ("docs/evidence.md", "docs/evidence/kahan_parts.png"),
        ("matplotlib",),
        True,
    ),
    "cancelled_updates": Benchmark(
        "papers",
        "Zamirai, figure 9, table 4: cancelled updates, AUC of a small DLRM",
        3,
        ("docs/evidence.md", "docs/evidence/cancelled_updates.png"),
        ("matplotlib",),
        True,
    ),
    "text_roundings": Benchmark(
        "papers",
        "Zamirai, table 4: an encoder and a GRU by rounding of the weights",
        5,
        ("docs/evidence.md", "docs/evidence/text_roundings.png"),
        ("matplotlib",),
        True,
    ),
    "demotion_orders": Benchmark(
        "papers",
        "Lee, figures 4 to 6: where 8 bits diverge, by order of demotion, promotion",
        5,
        ("docs/evidence.md", "docs/evidence/demotion_orders.png"),
        ("matplotlib", "sklearn"),
        True,
    ),
    "bin_changes": Benchmark(
        "papers",
        "LPMM, figure 2: nearest against stochastic rounding by bits",
        4,
        ("docs/evidence.md", "docs/evidence/bin_changes.png"),
        ("matplotlib",),
        True,
    ),
    "microbatches": Benchmark(
        "papers",
        "LPMM, figure 3, tables 2 and 3: N microbatches per update, by bits",
        8,
        ("docs/evidence.md", "docs/evidence/microbatches.png"),
        ("matplotlib", "sklearn"),
        True,
    ),
    "lpmm_states": Benchmark(
        "papers",
        "LPMM, section 5.1, tables 4 and 5: codes of the momentum, Adam, live bits",
        5,
        ("docs/evidence.md", "docs/evidence/lpmm_states.png"),
        ("matplotlib", "sklearn"),
        True,
    ),
    "lpmm_text": Benchmark(
        "papers",
        "LPMM, table 4: Adam on a small encoder of text, by bits of the weights",
        4,
        ("docs/evidence.md", "docs/evidence/lpmm_text.png"),
        ("matplotlib",),
        True,
    ),
    "loss_scales": Benchmark(
        "papers",
        "OpenSeq2Seq: overflows of LogNormal and Backoff scales in float16",
        1,
        ("docs/evidence.md", "docs/evidence/loss_scales.png"),
        ("matplotlib",),
        True,
    ),
    "regularizers": Benchmark(
        "papers",
        "OpenSeq2Seq: a penalty on the weights in float16 and at the master",
        3,
        ("docs/evidence.md", "docs/evidence/regularizers.png"),
        ("matplotlib", "sklearn"),
        True,
    ),
    "low_moments": Benchmark(
        "training",
        "a network on digits by moments of 8, 6 and 4 bits, beside float32",
        3,
        ("docs/accuracy.md",),
        ("sklearn",),
    ),
    "four_bit_moments": Benchmark(
        "training",
        "the same by ideas of how 4 bits might do for both moments",
        4,
        ("docs/ideas/quantised_moments.md",),
        ("sklearn",),
    ),
    "rounding_errors": Benchmark(
        "training",
        "the same by weights whose rounding errors are lost, kept or in the momentum",
        4,
        ("docs/accuracy.md",),
        ("sklearn",),
    ),
    "pareto": Benchmark(
        "training",
        "bits per parameter against the loss, by weights and moments; resumable",
        8,
        ("docs/evidence.md", "docs/evidence/pareto.png"),
        ("matplotlib", "sklearn"),
        True,
    ),
    "gpt_formats": Benchmark(
        "training",
        "a small GPT by formats of weights and moments, beside float32: curves",
        10,
        ("docs/accuracy.md", "docs/evidence/gpt_formats.png"),
        ("matplotlib",),
    ),
    "compute_optimal": Benchmark(
        "training",
        "a GPT trained to the end of its schedule in each format, beside float32",
        120,
        (
            "docs/accuracy.md",
            "docs/evidence/compute_optimal.png",
            "docs/evidence/compute_optimal_large.png",
            "benchmarks/training/compute_optimal.json",
            "benchmarks/training/compute_optimal_large.json",
        ),
        TRAINING,
        has_full=True,
        in_all=False,
    ),
    "reinforcement": Benchmark(
        "training",
        "a small GPT fine-tuned by rewards at 1e-6 and more, in each format",
        12,
        (
            "docs/reinforcement.md",
            "docs/evidence/reinforcement.png",
            "benchmarks/training/reinforcement.json",
        ),
        ("matplotlib",),
    ),
    "muon_momentum": Benchmark(
        "training",
        "the same GPT by Muon, with its momentum in several codes",
        30,
        ("docs/accuracy.md",),
    ),
    "memory_and_loss": Benchmark(
        "training",
        "README's picture: memory by optimizer, losses that compute_optimal recorded",
        0.2,
        ("docs/memory_and_loss.png", "docs/accuracy.md"),
        ("matplotlib",),
    ),
    "cifar_optimizers": Benchmark(
        "training",
        "ResNet-18 on CIFAR-10 with any optimizer, or several side by side",
        3000,
        ("docs/accuracy.md", "docs/cifar10_sgd.png", "docs/ideas/loss_scaling.md"),
        TRAINING,
        in_all=False,
    ),
    "accuracy_tables": Benchmark(
        "training",
        "the same of LPMM and moments of few bits, by seeds, as tables",
        3000,
        ("docs/accuracy.md",),
        TRAINING,
        in_all=False,
    ),
    "precision_assignment": Benchmark(
        "training",
        "Lee, figure 4: accuracy by the ratio of low precision, of small networks",
        20,
        ("docs/ideas/precision.md", "docs/precision_tradeoff.png"),
        TRAINING,
    ),
    "weight_bits": Benchmark(
        "training",
        "Zamirai, figure 10: weights of 10 to 16 bits by rounding, on digits",
        2,
        ("docs/ideas/kahan.md",),
        ("sklearn",),
    ),
    "gpt_release": Benchmark(
        "training",
        "a small GPT with and without gradient release: loss and memory",
        2,
        ("docs/ideas/release.md",),
        ("tqdm",),
    ),
    "peers": Benchmark(
        "peers",
        "AdamW of other libraries: bytes, programs, time, loss, failures",
        15,
        ("docs/peers.md", "benchmarks/peers/peers.json"),
        GPU_COMPILER,
    ),
    "trainers": Benchmark(
        "trainers",
        "other libraries' trainers with optax's AdamW and ours: loss, bytes",
        8,
        ("docs/trainers.md", "benchmarks/trainers/trainers.json"),
        ("tunix", "numpyro", "haiku", "keras", "haliax", "optimistix", "jaxopt"),
        in_all=False,
    ),
}
