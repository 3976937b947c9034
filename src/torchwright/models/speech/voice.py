"""Voice activity: speech changes its spectrum several times a second, and its partials do not stand still.

Energy alone does not tell a voice from a fan, hum or music. Three measures of each second do, at any loudness:

- *change*: the share of time in which the shape of the spectrum moves quickly, as between two sounds of speech. Steady
  noise, hum and tones have none, whatever their level does. (The long-term variability of Ghosh, Tsiartas and
  Narayanan, "Robust Voice Activity Detection Using Long-Term Signal Variability", 2011, by differences of levels.)
- *steadiness*: the share of power in partials that keep their frequency for an eighth of a second. Notes and hum do;
  the pitch of a voice moves.
- *purity*: the share of power in the three strongest partials of a short spectrum, wherever they move. Dialled digits,
  sirens, whistles and Morse code have little besides; a voice has its formants. High frequencies are raised as in
  linear prediction (pre-emphasis), since most of a vowel's power lies in its lowest partials.

The limits were set on voices of espeak-ng in noise of up to their own level, and on tones, chords, melodies, noises,
hum and signals. They are lenient: speech in loud noise passes, and sirens of many partials with it. A single word in
music as loud as itself is missed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from torchwright.models.speech.pauses import levels
from torchwright.models.speech.sound import RATE

HOP, FRAME = RATE // 100, 512
"""Samples between short spectra, and in one."""
AUDIBLE = 2.0**-15
"""Least level that is heard: the last bit of 16. Speech that was recorded too quietly is well above."""
BANDS_HZ = np.geomspace(150, 5000, 17)
"""Edges of the bands whose levels are the shape of a short spectrum."""
SMOOTHED, LAG = 5, 12
"""Short spectra that are averaged, and between two that are compared: 120 ms, the length of a sound of speech."""
FLOOR_DB, ACTIVE_DB = 40.0, 30.0
"""Below the second's loudest band, where levels mean nothing; below its loudest time, which is not looked at."""
MOVED_DB = 3.0
"""Mean change of the bands that counts: twice that of steady noise, half that of speech."""
LONG_HOP, LONG, LONG_LAG = 512, 2048, 4
"""Samples between long spectra, and in one (bins of 7.8 Hz); and between two that are compared: 128 ms."""
LONG_BINS = slice(16, 640)
"""Bins of a long spectrum from 125 Hz to 5 kHz."""
SECOND, STEP = 100, 25
"""Short spectra that are judged together, and between two such places."""
CHANGE = 0.15
"""Least share of a second. The word "stop" has 0.27, speech in white noise of its own level 0.24 or more."""
STEADY = 0.25
"""Most power in steady partials: speech has up to 0.1, noise 0.2, chords and melodies 0.3 or more."""
PARTIALS, LOBE = 3, 2
"""Partials of a short spectrum that are counted, and bins on either side of each: the main lobe of the window."""
EMPHASIS = 0.97
"""Coefficient of the pre-emphasis, as recognizers use it."""
PURE_TIME = 0.2
"""Share of a second's time that may be less pure: digits begin and end in clicks."""
PURE = 0.6
"""Most power in few partials: speech has up to 0.32, a word over a tone 10 dB below 0.6, dialled digits 0.61."""
CHANGE_OVER_TONES = 0.65
"""Share of a second by which speech is heard over music or hum: chords and melodies have up to 0.63."""
NEAR_SECONDS = 0.25
"""Around a segment, whose times may be as wrong as that."""
FEWEST_MOVED = 5
"""Short spectra with change that a segment has at least: 50 ms."""


@dataclass(frozen=True, kw_only=True)
class Voice:
    """Judgements of overlapping seconds of a sound, `STEP` short spectra apart."""

    reasons: tuple[str | None, ...]
    """A reason for each second without a voice; None where a voice may be."""
    moved_T: np.ndarray
    """Which short spectra have change, in seconds where a voice may be."""

    @property
    def anywhere(self) -> bool:
        """True if a voice may be somewhere in the sound."""
        return None in self.reasons

    def during(self, start: float, end: float) -> bool:
        """Return whether a voice may be between two times in seconds, or near them."""
        near = round((start - NEAR_SECONDS) * RATE / HOP), round((end + NEAR_SECONDS) * RATE / HOP)
        return int(self.moved_T[max(0, near[0]) : max(0, near[1])].sum()) >= FEWEST_MOVED

    def instead(self, start: float, end: float) -> str:
        """Return what is heard between two times in seconds in place of a voice."""
        first = max(0, int(start * RATE / HOP) // STEP)
        inside = self.reasons[first : max(first + 1, int(end * RATE / HOP) // STEP)]
        counted = Counter(reason for reason in inside if reason is not None)
        return counted.most_common(1)[0][0] if counted else "a pause"


def find_voice(samples: np.ndarray) -> Voice:
    """Judge each second of samples (T,) at 16 kHz. Takes 3 ms of processor time for a second."""
    count = len(samples) // HOP + 1  # short spectra
    padded = np.pad(samples, (FRAME // 2, SECOND * HOP + LONG))  # a short sound is a second all the same
    power_TF = _spectra(padded, FRAME, HOP)
    bands_TB, pure_2T = _bands(power_TF), _few_partials(power_TF)
    steady_2L = _partials(padded)
    loud_T = np.repeat(levels(samples) > AUDIBLE, 2)  # a level spans two hops
    moved_T = np.zeros(count, bool)
    reasons = list[str | None]()
    for first in range(0, max(1, count - SECOND // 2), STEP):
        moved = _moved(bands_TB[first : first + SECOND + LAG])
        long = slice(first * HOP // LONG_HOP, (first + SECOND) * HOP // LONG_HOP - LONG_LAG)
        audible = bool(loud_T[first : first + SECOND].any())
        pure = _purity(pure_2T[:, first : first + SECOND])
        reason = _reason(audible, float(moved.mean()), steady_2L[:, long], pure)
        reasons.append(reason)
        if reason is None:
            middle = first + LAG // 2
            moved_T[middle : middle + SECOND] |= moved[: max(0, count - middle)]
    return Voice(reasons=tuple(reasons), moved_T=moved_T)


def _reason(audible: bool, change: float, steady_2L: np.ndarray, pure: float) -> str | None:
    """Return what a second holds that has no voice."""
    if not audible:
        return "silence"
    if change < CHANGE:
        return "a steady sound (noise, hum or a tone)"
    if pure > PURE:
        return "signals or whistling"
    partials, power = steady_2L.sum(1)
    tonal = partials >= STEADY * power
    return "music or tones" if tonal and change < CHANGE_OVER_TONES else None


def _few_partials(power_TF: np.ndarray) -> np.ndarray:
    """Return the power in the strongest partials, and the whole power (2, T), high frequencies raised."""
    hertz_F = np.fft.rfftfreq(FRAME, 1 / RATE)
    raised_F = np.abs(1 - EMPHASIS * np.exp(-2j * np.pi * hertz_F / RATE)) ** 2
    heard_F = (hertz_F >= BANDS_HZ[0]) & (hertz_F <= BANDS_HZ[-1])
    left_TF = (power_TF * raised_F)[:, heard_F]
    whole_T, last = left_TF.sum(1), left_TF.shape[1] - 1
    for _ in range(PARTIALS):
        lobe_TN = (left_TF.argmax(1)[:, None] + np.arange(-LOBE, LOBE + 1)).clip(0, last)
        np.put_along_axis(left_TF, lobe_TN, 0, 1)
    return np.stack([whole_T - left_TF.sum(1), whole_T])


def _purity(pure_2T: np.ndarray) -> float:
    """Return the share of few partials that all but the least pure of a second's loud times exceed."""
    partials_T, whole_T = pure_2T
    loud_T = whole_T > whole_T.max() * 10 ** (-ACTIVE_DB / 10)
    return float(np.quantile(partials_T[loud_T] / whole_T[loud_T], PURE_TIME)) if loud_T.any() else 0.0


def _bands(power_TF: np.ndarray) -> np.ndarray:
    """Return the smoothed power of each band (T, B)."""
    edges = np.searchsorted(np.fft.rfftfreq(FRAME, 1 / RATE), BANDS_HZ)
    bands_TB = np.add.reduceat(power_TF[:, : edges[-1]], edges[:-1], axis=1)
    sums_TB = np.cumsum(np.pad(bands_TB, ((SMOOTHED // 2 + 1, SMOOTHED // 2), (0, 0)), mode="edge"), axis=0)
    return np.maximum(0, sums_TB[SMOOTHED:] - sums_TB[:-SMOOTHED]) / SMOOTHED


def _moved(bands_TB: np.ndarray) -> np.ndarray:
    """Return at which of a second's short spectra the shape changes quickly while there is sound."""
    tiny = np.finfo(np.float64).tiny
    floor = max(float(bands_TB.max()) * 10 ** (-FLOOR_DB / 10), tiny)
    shape_TB = 10 * np.log10(np.maximum(bands_TB, floor))
    shape_TB -= shape_TB.mean(1, keepdims=True)
    power_T = np.maximum(bands_TB.sum(1), tiny)
    active_T = power_T > power_T.max() * 10 ** (-ACTIVE_DB / 10)
    change_T = np.abs(shape_TB[LAG:] - shape_TB[:-LAG]).mean(1)
    return (change_T > MOVED_DB) & active_T[LAG:] & active_T[:-LAG]


def _partials(samples: np.ndarray) -> np.ndarray:
    """Return the power in steady partials, and the whole power (2, L)."""
    power_LF = _spectra(samples, LONG, LONG_HOP)[:, LONG_BINS]
    inner_LF = power_LF[:, 1:-1]
    peaks_LF = (inner_LF > power_LF[:, :-2]) & (inner_LF > power_LF[:, 2:])
    lobes_LF = (inner_LF + power_LF[:, :-2] + power_LF[:, 2:]) * peaks_LF
    steady_L = np.minimum(lobes_LF[LONG_LAG:], lobes_LF[:-LONG_LAG]).sum(1)
    whole_L = power_LF.sum(1)
    return np.stack([steady_L, (whole_L[LONG_LAG:] + whole_L[:-LONG_LAG]) / 2])


def _spectra(samples: np.ndarray, size: int, hop: int) -> np.ndarray:
    frames = np.lib.stride_tricks.sliding_window_view(samples, size)[::hop]
    return np.abs(np.fft.rfft(frames * np.hanning(size)).astype(np.complex64)).astype(np.float64) ** 2
