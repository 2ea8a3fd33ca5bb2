"""The host runs ahead of a device that hangs; the saved version is the one that the device holds."""

from __future__ import annotations

from tests.gpu.stand import Stand, Thread, assert_same, saved_tensors
from tests.gpu.training import Training, references

WARM = 3


def host_ahead(
    stand: Stand, optimizer: str = "adam-foreach", scaled: bool = False, lead: int = 2, warm: int = WARM
) -> None:
    """Queue update ``warm + 1`` and all later ones behind a kernel that spins; the saved version is ``warm``.

    A GradScaler that asks the device for infinities stops the host in the first of them. Afterwards training goes on as
    without the save.
    """

    def make() -> Training:
        return Training(stand, optimizer, scaled=scaled)

    wanted = references(make, warm + lead + 2)
    training = make()
    with stand.protected():
        training.protect()
        for _ in range(warm):
            training.step()
        stand.synchronize()

        training.gradient()
        spin = stand.spin()
        training_thread = Thread(stand, [training.update, *[training.step] * lead])
        try:
            stuck = training_thread.wait_stuck()
            stand.numbers["host at"] = training.steps
            version, checkpoint = stand.save()
        finally:
            spin.release()
        training_thread.join()
        assert version == (warm if stand.hangs else warm + 1 + lead), f"the host was at {training.steps}, {stuck=}"
        assert_same(saved_tensors(checkpoint), wanted[version])
        training.step()
        assert_same(training.state(), wanted[warm + lead + 2])
