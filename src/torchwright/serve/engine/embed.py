"""An encoder that is served: texts in, embeddings or logits out, one of its fixed calls at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchwright.core.errors import TorchwrightError
from torchwright.core.paths import file_digest
from torchwright.optimization.artifact import folder as artifact
from torchwright.serve.engine.fingerprint import fingerprint_of_files
from torchwright.serve.wire.messages import Embed, Embedded, EngineReady, Failed, RequestRefused
from torchwright.workloads.encoding import TextAnswerer


class ServedEncoder:
    """A sentence encoder's artifact or a classifier of text, its tokenizer, and the requests that wait.

    At most `max_queue` texts wait. Requests are answered in the order in which they came.
    Raises `ModelError` where it has no tokenizer.
    """

    purpose = "this model embeds text; it does not write it"

    def __init__(self, folder: Path, model: TextAnswerer, notices: list[str], max_queue: int) -> None:
        layout = model.layout
        self._model, self._max_queue = model, max_queue
        self._texts: dict[str, int] = {}
        """Id → how many."""
        self._answers: dict[str, Iterator[Embedded]] = {}
        labels, weights = model.labels(), sorted(folder.rglob("*.safetensors"))
        manifest = folder / artifact.MANIFEST
        self.ready = EngineReady(
            kind="encoder" if labels is None else "classifier",
            vocabulary=model.tokens.tokenizer.get_vocab_size(),
            context=layout.tokens,
            pages=0,
            page_tokens=0,
            stop_ids=[],
            max_running=1,
            weight_bytes=sum(file.stat().st_size for file in weights),
            kv_bytes=0,
            fingerprint=file_digest(manifest)[:24] if manifest.is_file() else fingerprint_of_files(weights),
            notices=notices,
            labels=labels.names if labels else [],
            activation=labels.activation if labels else "none",
            score_activation=model.score_activation(),
        )

    @property
    def idle(self) -> bool:
        return not self._answers

    def submit(self, message: Embed) -> Failed | RequestRefused | None:
        """Take a request, or say why not."""
        if not message.texts or not all(message.texts):
            return Failed(id=message.id, text="there is nothing to read, or one of the texts is empty")
        waiting = sum(self._texts.values())
        if waiting + len(message.texts) > self._max_queue:
            text = f"{waiting} texts wait; at most {self._max_queue} may"
            return RequestRefused(id=message.id, reason="queue_full", text=text, retry_after_s=1.0)
        self._texts[message.id] = len(message.texts)
        self._answers[message.id] = self._answer(message)
        return None

    def cancel(self, id: str) -> None:
        """Forget a request that nobody waits for; unknown ids have ended."""
        self._texts.pop(id, None)
        self._answers.pop(id, None)

    def cancel_all(self) -> None:
        """Forget every request."""
        self._texts.clear()
        self._answers.clear()

    def step(self) -> Embedded | Failed:
        """Run one call of the first request: some of its embeddings, or what is wrong with its texts."""
        id, answer = next(iter(self._answers.items()))
        try:
            found = next(answer)
        except TorchwrightError as error:
            self.cancel(id)
            return Failed(id=id, text=str(error))
        self._texts[id] -= len(found.places)
        if not self._texts[id]:
            self.cancel(id)
        return found

    def _answer(self, message: Embed) -> Iterator[Embedded]:
        calls = self._model.by_call(message.texts, message.pairs, special=message.special)
        for places, rows_nE, tokens in calls:
            yield Embedded(id=message.id, places=places, vectors=rows_nE.tolist(), tokens=tokens)
