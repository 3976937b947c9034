"""A pipeline that is served: prompts in, pictures out, one picture after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torchwright.core.errors import ModelError, TorchwrightError
from torchwright.models.diffusion.diffuser import Diffuser
from torchwright.serve.engine.fingerprint import fingerprint_of_files
from torchwright.serve.wire.messages import EngineReady, Failed, FromEngine, Paint, Painted, RequestRefused


class ServedDiffuser:
    """A pipeline and the pictures that are asked of it, in the order in which they came; at most `max_queue` wait.

    A picture depends on nothing that was made before it.
    """

    purpose = "this model makes pictures; it does not read or write text"

    def __init__(self, diffuser: Diffuser, *, max_queue: int) -> None:
        if diffuser.folder.family.video:
            raise ModelError(
                f"{diffuser.folder.path} makes films, which are not served",
                found=diffuser.folder.pipeline,
                next="draw one with `torchwright imagine`",
            )
        self._diffuser, self._max_queue = diffuser, max_queue
        self._waiting = deque[Paint]()
        self._current: str | None = None
        """The id of the picture that is being made; None once nobody wants it."""
        files = sorted(diffuser.folder.path.rglob("*.safetensors"))
        self.ready = EngineReady(
            kind="painter",
            vocabulary=0,
            context=0,
            pages=0,
            page_tokens=0,
            stop_ids=[],
            max_running=1,
            weight_bytes=sum(file.stat().st_size for file in files),
            kv_bytes=0,
            fingerprint=fingerprint_of_files(files),
            notices=list(diffuser.folder.notices),
        )

    @property
    def idle(self) -> bool:
        return not self._waiting

    def submit(self, message: Paint) -> Failed | RequestRefused | None:
        """Take a picture's prompt, or say why not."""
        if len(self._waiting) >= self._max_queue:
            text = f"{len(self._waiting)} pictures wait; at most {self._max_queue} may"
            return RequestRefused(id=message.id, reason="queue_full", text=text, retry_after_s=1.0)
        try:
            diffuser = self._diffuser
            size, steps = message.size or diffuser.size, message.steps
            steps = diffuser.habits.steps if steps is None else steps
            diffuser.check(message.prompt, message.seed, steps, size, style=message.style)
        except TorchwrightError as error:
            return Failed(id=message.id, text=str(error))
        self._waiting.append(message)
        return None

    def cancel(self, id: str) -> None:
        """Forget a picture that nobody waits for: one that is being made ends with its step."""
        if self._current == id:
            self._current = None
        for message in [message for message in self._waiting if message.id == id]:
            self._waiting.remove(message)

    def cancel_all(self) -> None:
        """Forget every picture."""
        self._current = None
        self._waiting.clear()

    def paint(self, send: Callable[[FromEngine], None], listen: Callable[[], None]) -> None:
        """Make the next picture. After each step `send` is given it, and `listen` takes what has come meanwhile."""
        asked = self._waiting.popleft()
        self._current = asked.id

        def on_step(done: int, total: int) -> None:
            listen()
            if self._current is None:
                raise _Unwanted
            send(Painted(id=asked.id, done=done))

        try:
            drawn = self._diffuser.draw(
                asked.prompt,
                seed=asked.seed,
                steps=asked.steps,
                size=asked.size,
                style=asked.style,
                on_step=on_step,
            )
        except _Unwanted:
            return
        except TorchwrightError as error:
            send(Failed(id=asked.id, text=str(error)))
            return
        finally:
            self._current = None
        height, width, _ = drawn.pixels_HW3.shape
        send(
            Painted(
                id=asked.id,
                done=drawn.steps,
                pixels=drawn.pixels_HW3.tobytes(),
                size=(height, width),
                notices=list(drawn.notices),
            )
        )


class _Unwanted(Exception):
    """Nobody waits for the picture that is being made."""
