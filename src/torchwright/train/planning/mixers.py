"""Bytes that a recurrent mixer keeps of a token, counted operator by operator over `train/model/recurrent.py`."""

from __future__ import annotations

from torchwright.train.mixer_shape import CHUNK, SEGMENT, MixerShape
from torchwright.train.planning.job import Job


class MixerActivations:
    """Bytes per token; tensor-parallel processes share heads and channels."""

    def __init__(self, job: Job, tp: int) -> None:
        self.job, self.a, self.tp = job, job.width, tp

    def kept(self, mixer: MixerShape) -> float:
        """From forward to backward."""
        a, values = self.a, mixer.values / self.tp
        if not mixer.heads:
            # A short convolution: its factors, padded product and output, and that of the gate.
            return a * (4 if self.job.compile else 6) * values
        heads, convolved = mixer.heads / self.tp, self._convolved(mixer)
        if self.job.compile:
            # What the recurrence reads and gave, and the projections; all else is computed again.
            return a * (2 * convolved + 2 * values) + 8 * heads + self._states(mixer)
        # Padded, convolved and activated; softplus and sigmoid, decay and gain in float32.
        kept = a * 3 * convolved + 16 * heads + self._states(mixer)
        # Gate, its silu, their product and the norm before and after its weights are float32.
        gating = 4 * 5 * values if mixer.normed else a * 3 * values
        return kept + gating + a * values

    def selective(self, mixer: MixerShape) -> float:
        """Return the bytes of the outputs of matrix products and the recurrence."""
        return self.a * (mixer.inputs + mixer.values) / self.tp + self._states(mixer)

    def passing(self, mixer: MixerShape) -> float:
        """Return what the mixer's backward pass holds at once: gradients, and a segment that is computed again."""
        gradients = self.a * 2 * (self._convolved(mixer) + mixer.values / self.tp)
        if not mixer.heads:
            return gradients
        share = min(1.0, SEGMENT / self.job.context)
        chunk = min(CHUNK, self.job.context)
        # Between the tokens of a chunk: decay and scores; asked and brought by head; states of each chunk. The delta
        # rule has a system of equations besides, and what it knows of keys.
        times = 3 if mixer.norm else 2
        by_head = mixer.state / mixer.values * mixer.heads
        inside = 4 * (times * (chunk * mixer.heads + by_head) + 4 * mixer.values + 3 * mixer.state / chunk)
        return gradients + share * inside / self.tp

    def _convolved(self, mixer: MixerShape) -> float:
        """Channels of a process's convolutions; keys that all heads share are whole."""
        return mixer.values / self.tp + mixer.keys / (1 if mixer.whole else self.tp)

    def _states(self, mixer: MixerShape) -> float:
        """States at the begins of segments."""
        segments = -(-self.job.context // SEGMENT)
        return 4 * mixer.state * segments / self.job.context / self.tp
