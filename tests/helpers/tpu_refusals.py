"""Which leaves the kernels for TPUs take."""

from pallas_kernels.fused_update.tpu import kernel as tpu


def noted(monkeypatch) -> list[bool]:
    """A list that grows by whether a kernel takes a leaf, each time that is asked."""
    taken, refusal = [], tpu.refusal

    def asked(*args):
        why_not = refusal(*args)
        taken.append(why_not is None)
        return why_not

    monkeypatch.setattr(tpu, "refusal", asked)
    return taken
