"""Speech that is made: sentences of a small grammar, spoken by espeak-ng and flite, as windows of a small Whisper.

Both are Debian packages (`apt-get install espeak-ng flite`). Everything follows from a seed.
"""

from __future__ import annotations

import io
import shutil
import subprocess
from dataclasses import dataclass
from random import Random

import numpy as np
import soundfile
import soxr

RATE = 16_000
SECONDS = 5
"""Length of a window."""
TICKS_PER_SECOND = 50
SILENCE = 250
"""Samples below this, of 32,767, are silence, which an engine leaves before and after the voice."""
MOST_SPOKEN = 4.4
"""Seconds of a sentence; a longer one is drawn anew."""


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ONES = words("zero one two three four five six seven eight nine")
TEENS = words("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
ROOMS = words("kitchen bedroom bathroom garage garden office hall attic basement library")
THINGS = words("light lamp heater fan door window radio television oven kettle alarm camera curtain printer")
COLORS = words("red green blue yellow white black orange purple brown silver")
VERBS = words("open close lock unlock start stop check clean move paint repair")
DAYS = words("monday tuesday wednesday thursday friday saturday sunday")
MONTHS = words("january february march april may june july august september october november december")
NAMES = words("anna peter maria john susan david helen robert laura thomas julia martin")
PLACES = words("london paris berlin madrid rome vienna dublin oslo prague athens")
FOODS = words("apples bananas oranges potatoes tomatoes onions carrots eggs cookies lemons")
DRINKS = words("coffee tea water milk juice soup")
ANIMALS = words("dogs cats horses birds rabbits sheep ducks mice bears wolves")
SPOTS = words("river bridge forest mountain village station market church school beach")
STATES = words("old new big small quiet happy hungry tired young strong")

ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029", "en-gb-x-gbclan", "en-gb-x-gbcwmd")
VARIANTS = (
    *("m1", "m2", "m3", "m4", "m6", "m7", "m8", "f1", "f2", "f3", "f5"),
    *("Andy", "Annie", "Alex", "belinda", "caleb", "david", "Denis", "ed", "edward", "Gene", "Hugo", "john"),
    *("Lee", "linda", "max", "michael", "mike", "paul", "rob", "robert", "steph", "steph2", "travis"),
    *("victor", "quincy", "jacky", "Andrea", "miguel", "pablo", "grandpa", "adam", "RicishayMax"),
)
HEARD = (
    *(f"espeak:{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS),
    *(("flite:rms", "flite:slt", "flite:kal16") * 20),
)
"""Voices that a model is trained on; one in six speaks by flite."""
NEVER_HEARD = (
    *("espeak:en-us+Alicia", "espeak:en-gb+benjamin", "espeak:en-us+m5", "espeak:en-gb-x-rp+f4"),
    *("espeak:en-us+zac", "espeak:en-us-nyc+steph3", "flite:awb"),
)


def number(draw: Random) -> str:
    """A number from 0 to 9999 in words."""
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(ONES)
    if kind < 0.5:
        return draw.choice(TEENS)
    tens = draw.choice(TENS) + (f" {draw.choice(ONES[1:])}" if draw.random() < 0.7 else "")
    if kind < 0.8:
        return tens
    return f"{draw.choice(ONES[1:])} {draw.choice(['hundred', 'thousand'])} and {tens}"


def sentence(draw: Random) -> str:
    """One of the grammar's sentences, of two to about ten words."""
    pick = draw.choice
    templates = (
        lambda: (
            f"turn {pick(['on', 'off'])} the {pick((*COLORS, *STATES))} {pick(THINGS)} in the {pick(ROOMS)}"
        ),
        lambda: f"{pick(VERBS)} the {pick(THINGS)} {pick(['now', 'again', 'tomorrow', 'please'])}",
        lambda: f"{pick(VERBS)} the {pick(COLORS)} {pick(THINGS)} in the {pick(ROOMS)}",
        lambda: f"set the {pick(THINGS)} to {number(draw)} {pick(['percent', 'degrees', 'minutes'])}",
        lambda: f"call {pick(NAMES)} {pick(['on', 'next', 'every'])} {pick(DAYS)}",
        lambda: f"wake me at {pick(ONES[1:] + TEENS)} {pick(['thirty', 'fifteen', 'forty', 'ten'])}",
        lambda: f"order {number(draw)} {pick(FOODS)} and some {pick(DRINKS)}",
        lambda: f"what is the weather in {pick(PLACES)} on {pick(DAYS)}",
        lambda: f"{pick(NAMES)} travels to {pick(PLACES)} in {pick(MONTHS)}",
        lambda: f"{pick(NAMES)} sees {number(draw)} {pick(COLORS)} {pick(ANIMALS)} near the {pick(SPOTS)}",
        lambda: f"the {pick(STATES)} {pick(ANIMALS)} run to the {pick(STATES)} {pick(SPOTS)}",
        lambda: f"the number is {number(draw)}",
        lambda: " ".join(pick(ONES) for _ in range(draw.randint(3, 6))),
        lambda: f"spell {' '.join(pick(LETTERS) for _ in range(draw.randint(2, 4)))}",
    )
    return pick(templates)()


@dataclass(frozen=True)
class Spoken:
    """A window: samples in float32 from −1 to 1, and (text, begin, end) in ticks of 20 ms.

    The last text is None if it goes on beyond the window.
    """

    samples: np.ndarray
    said: tuple[tuple[str | None, int, int], ...]


def missing() -> str | None:
    """The engine that is not installed, if one is."""
    return next((name for name in ("espeak-ng", "flite") if shutil.which(name) is None), None)


def speak(text: str, voice: str, draw: Random) -> np.ndarray:
    """The text in a voice such as espeak:en-us+f2, at a speed and pitch of its own.

    Float32 at 16 kHz, without the silence around it.
    """
    engine, name = voice.split(":")
    if engine == "flite":
        stretch = f"duration_stretch={draw.uniform(0.85, 1.15):.2f}"
        words = ["flite", "-voice", name, "--setf", stretch, "-t", text, "-o", "/dev/stdout"]
    else:
        speed, pitch = str(draw.randint(135, 190)), str(draw.randint(25, 75))
        words = ["espeak-ng", "-v", name, "-s", speed, "-p", pitch, "--stdout", text]
    data = subprocess.run(words, capture_output=True, check=True).stdout
    at = data.index(b"data") + 8  # neither engine knows the length when it writes the header to a pipe
    rate = int.from_bytes(data[24:28], "little")
    whole = np.frombuffer(data[at : at + (len(data) - at) // 2 * 2], "<i2")
    loud = np.flatnonzero(np.abs(whole.astype(np.int32)) > SILENCE)
    if not len(loud):
        raise ValueError(f"{voice} says nothing of {text!r}")
    samples = whole[loud[0] : loud[-1] + 1].astype(np.float32) / 32768
    return samples if rate == RATE else soxr.resample(samples, rate, RATE).astype(np.float32)


def window(seed: int, voices: tuple[str, ...], *, single: bool = False) -> Spoken:
    """A window of `SECONDS`: a sentence, at times a second one that may be cut off, or noise alone; with noise.

    `single`: one whole sentence, for measuring.
    """
    draw = Random(seed)
    voice, length = draw.choice(voices), SECONDS * RATE
    samples, said = np.zeros(length, np.float32), list[tuple[str | None, int, int]]()
    at = round(draw.uniform(0.0, 0.4) * RATE)
    while single or draw.random() > 0.03 or said:
        text = sentence(draw)
        sound = speak(text, voice, draw)
        if not said and (len(sound) > MOST_SPOKEN * RATE or at + len(sound) > length):
            continue
        fits = at + len(sound) <= length
        samples[at : at + len(sound)] += sound[: length - at]
        end = min(length, at + len(sound))
        said.append((text if fits else None, _tick(at), _tick(end)))
        at = end + round(draw.uniform(0.25, 0.6) * RATE)
        if single or not fits or at > length - RATE // 2 or draw.random() < 0.5:
            break
    samples *= draw.uniform(0.15, 0.9) / max(1e-3, float(np.abs(samples).max()))
    return Spoken(_noisy(samples, seed, draw.choice([None, 30.0, 20.0, 10.0])), tuple(said))


def flac(samples: np.ndarray) -> bytes:
    """Samples as a FLAC file."""
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, "PCM_16", format="FLAC")
    return file.getvalue()


def _noisy(samples: np.ndarray, seed: int, decibels: float | None) -> np.ndarray:
    """With noise whose power falls with the frequency (pink), so many decibels below the voice."""
    if decibels is None:
        return samples
    white = np.fft.rfft(np.random.default_rng(seed).standard_normal(len(samples)))
    pink = np.fft.irfft(white / np.sqrt(np.arange(len(white)) + 1.0), len(samples))
    power = float(np.mean(samples**2)) or 1e-4
    return (samples + pink * np.sqrt(power / np.mean(pink**2) / 10 ** (decibels / 10))).astype(np.float32)


def _tick(sample: int) -> int:
    return round(sample * TICKS_PER_SECOND / RATE)
