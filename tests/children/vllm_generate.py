"""vLLM's engine as a user starts it: prints the tokens it generates, greedily, as JSON. Arguments:
model, and options of `LLM` as JSON."""

from __future__ import annotations

import json
import sys


def main():
    from vllm import LLM, SamplingParams

    model, options = sys.argv[1:]
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        **json.loads(options),
    )
    made = engine.generate(
        ["three seven one", "nine"],
        SamplingParams(max_tokens=16, temperature=0, logprobs=1, ignore_eos=True),
    )
    print(
        json.dumps(
            [
                [
                    list(one.outputs[0].token_ids),
                    one.outputs[0].text,
                    one.outputs[0].cumulative_logprob,
                ]
                for one in made
            ]
        )
    )


if __name__ == "__main__":  # vLLM starts processes anew
    main()
