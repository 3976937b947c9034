"""TRL's own client of vLLM against the server at argv[1]; prints what it got as JSON.

It runs in an environment of its own that has TRL. The client asks for vLLM to be installed, and uses it for nothing but
the weights' way over NCCL.
"""

from __future__ import annotations

import json
import sys

from trl.generation import vllm_client  # pyright: ignore[reportMissingImports]


def main() -> None:
    vllm_client.is_vllm_available = lambda *args, **options: True
    client = vllm_client.VLLMClient(base_url=sys.argv[1])
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    seed = {"seed": 3}
    drawn = client.generate(prompts, n=2, max_tokens=12, generation_kwargs=seed)
    top = client.generate(prompts[:1], max_tokens=6, logprobs=2, temperature=0.7, generation_kwargs=seed)
    messages = [[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Well?"}]]
    chat = client.chat(messages, n=2, max_tokens=8, generation_kwargs=seed)
    refused = ""
    try:
        client.init_communicator(device="cpu")
    except Exception as error:
        refused = str(error)
    print(json.dumps({"drawn": drawn, "top": top, "chat": chat, "refused": refused}))


if __name__ == "__main__":
    main()
