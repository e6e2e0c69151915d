"""Embeddings of some sentences by the model of each folder. Prints, as JSON, their bits, and how
alike they are.

python minilm.py FOLDER …
"""

import json
import sys

import torch
from sentence_transformers import SentenceTransformer

SENTENCES = [
    "Each device saves its part.",
    "Every accelerator stores its shard.",
    "The cat sleeps on the mat.",
    "",
]

torch.set_num_threads(1)
embedded = [SentenceTransformer(folder, device="cpu").encode(SENTENCES) for folder in sys.argv[1:]]
print(
    json.dumps(
        [
            {
                "bits": vectors.tobytes().hex(),
                "shape": vectors.shape,
                "alike": (vectors[:1] @ vectors.T)[0].tolist(),
            }
            for vectors in embedded
        ]
    )
)
