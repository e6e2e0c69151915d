"""Hugging Face's Trainer: its save points use shardckpt, and it resumes from the latest step.

Interrupt the first command with Ctrl-C, or kill it. The second one goes on from the latest saved
step:

    python examples/trainer.py
    python examples/trainer.py

Needs `pip install 'shardckpt[torch,hf] @ git+https://github.com/shardckpt/shardckpt'`.
To begin anew, remove runs/trainer.
"""

import os

os.environ["USE_TORCH_XLA"] = "0"  # use the CPU also where torch_xla is installed

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardckpt.training.integrations.hf_trainer import ShardckptCallback

RUN = "runs/trainer"  # or gs://bucket/run, s3://bucket/run

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
rows = [(torch.arange(16) * step + start) % 64 for step in range(1, 9) for start in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]

arguments = TrainingArguments(
    output_dir="runs/trainer_output",  # for what the Trainer writes besides checkpoints
    max_steps=100,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    logging_steps=1,
    save_steps=10,
    save_total_limit=2,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
# Saves when the Trainer would, in the background, and instead of the Trainer.
callback = ShardckptCallback(RUN)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[callback])

# None: nothing was saved yet, so that training starts from the beginning.
checkpoint = callback.resume(trainer)
if checkpoint:
    print("resuming from the latest saved step")
trainer.train(resume_from_checkpoint=checkpoint)
print(
    f"trained {trainer.state.global_step} steps; the log has {len(trainer.state.log_history)} "
    "entries"
)
