"""vLLM's engine that follows a publisher. Arguments: model, url, and options of `LLM` as JSON.

A line of standard input is a command; each prints a line of JSON: "next" takes the newest version,
"prepare" only prepares it, and "tokens" generates.
"""

from __future__ import annotations

import json
import sys

NAMED = {"include": "model/**", "strip_prefix": "model/"}


def main():
    from vllm import LLM, SamplingParams

    from shardckpt.views.vllm_follow import next_version

    model, url, options = sys.argv[1:]
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        weight_transfer_config={"backend": "shardckpt"},
        worker_extension_cls="shardckpt.views.vllm_follow.FollowWorker",
        **json.loads(options),
    )
    engine.init_weight_transfer_engine({"init_info": {"url": url, "options": NAMED}})
    print(json.dumps({"ready": True}), flush=True)
    greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    for line in sys.stdin:
        outcome = {}
        try:
            if line.strip() == "prepare":
                outcome["prepared"] = engine.collective_rpc("shardckpt_prepare")
            elif line.strip() == "next":
                outcome["step"] = next_version(engine)
                outcome["proofs"] = engine.collective_rpc("shardckpt_prove")
        except Exception as e:
            outcome["error"] = str(e)
        made = engine.generate(["three seven one", "nine"], greedy)
        outcome["tokens"] = [list(one.outputs[0].token_ids) for one in made]
        outcome["weight_version"] = engine.get_weight_version()
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":  # vLLM starts processes anew
    main()
