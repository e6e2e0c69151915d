"""The meaning of each tensor's dimensions in well-known families of models.

There is one table per naming scheme: a pattern, and a *logical axis* per dimension (a term of T5X
and MaxText). `preset` decides which mesh axis cuts which logical axis.

    embed            the width of the residual stream
    heads, kv_heads  query heads, and key-value heads, with or without the width of a head in the
                     same dimension
    mlp              the width of the feed-forward layer
    vocab            tokens
    expert           experts
    q+k+v            several of them concatenated
    -                dimensions that are never cut: the width of a head, scanned layers, positions

Patterns begin with `**/*`, so that they fit `model/model.layers.0…` as well as
`ema/module.layers.0…`. They also match optimizer state, which lies below the same names. A rule
applies only to tensors with exactly its number of dimensions. Scanned layers, which MaxText stacks
along the second dimension, have separate rules.

Sources: transformers 5 (modeling files, `base_model_tp_plan`), Meta's llama, mistral-inference,
gemma_pytorch, T5X's minimal configuration, MaxText's layers. torch's `Linear.weight` is (out, in);
GPT-2's `Conv1D.weight` is (in, out).
"""

from __future__ import annotations

_HF_ATTENTION = """
**/*self_attn.q_proj.weight                       heads embed
**/*self_attn.q_proj.bias                         heads
**/*self_attn.[kv]_proj.weight                    kv_heads embed
**/*self_attn.[kv]_proj.bias                      kv_heads
**/*self_attn.qkv_proj.weight                     q+k+v embed
**/*self_attn.o_proj.weight                       embed heads
**/*self_attn.o_proj.bias                         embed
**/*self_attn.[qk]_norm.weight                    -
"""

_HF_MLP = """
**/*mlp.gate_proj.weight                          mlp embed
**/*mlp.up_proj.weight                            mlp embed
**/*mlp.down_proj.weight                          embed mlp
**/*mlp.gate_proj.bias                            mlp
**/*mlp.up_proj.bias                              mlp
**/*mlp.down_proj.bias                            embed
"""

_HF_ENDS = """
**/*embed_tokens.weight                           vocab embed
**/*lm_head.weight                                vocab embed
**/*norm.weight                                   embed
**/*rotary_emb.inv_freq                           -
"""

_META = """
**/*attention.wq.weight                           heads embed
**/*attention.w[kv].weight                        kv_heads embed
**/*attention.wo.weight                           embed heads
**/*feed_forward.w[13].weight                     mlp embed
**/*feed_forward.w2.weight                        embed mlp
**/*tok_embeddings.weight                         vocab embed
**/*output.weight                                 vocab embed
**/*rope.freqs                                    -
"""

_MAXTEXT = """
**/self_attention*/query/kernel                   embed heads -
**/self_attention*/query/kernel                   embed - heads -
**/self_attention*/key/kernel                     embed kv_heads -
**/self_attention*/key/kernel                     embed - kv_heads -
**/self_attention*/value/kernel                   embed kv_heads -
**/self_attention*/value/kernel                   embed - kv_heads -
**/self_attention*/out/kernel                     heads - embed
**/self_attention*/out/kernel                     heads - - embed
**/self_attention*/*_norm/scale                   -
**/self_attention*/*_norm/scale                   - -
**/mlp*/wi_[01]/kernel                            embed mlp
**/mlp*/wi_[01]/kernel                            embed - mlp
**/mlp*/wo/kernel                                 mlp embed
**/mlp*/wo/kernel                                 mlp - embed
**/*norm*/scale                                   embed
**/*norm*/scale                                   embed -
**/token_embedder/embedding                       vocab embed
**/decoder/logits_dense/kernel                    embed vocab
"""

_HF_EXPERTS = """
**/*mlp.experts.gate_up_proj                      expert gate+up embed
**/*mlp.experts.down_proj                         expert embed mlp
**/*mlp.experts.*.gate_proj.weight                mlp embed
**/*mlp.experts.*.up_proj.weight                  mlp embed
**/*mlp.experts.*.down_proj.weight                embed mlp
**/*block_sparse_moe.experts.*.w[13].weight       mlp embed
**/*block_sparse_moe.experts.*.w2.weight          embed mlp
**/*mlp.shared_expert*.gate_proj.weight           mlp embed
**/*mlp.shared_expert*.up_proj.weight             mlp embed
**/*mlp.shared_expert*.down_proj.weight           embed mlp
**/*mlp.shared_expert_gate.weight                 - embed
**/*mlp.gate.weight                               - embed
**/*block_sparse_moe.gate.weight                  - embed
"""

_MISTRAL_EXPERTS = """
**/*feed_forward.experts.*.w[13].weight           mlp embed
**/*feed_forward.experts.*.w2.weight              embed mlp
**/*feed_forward.gate.weight                      - embed
"""

_MAXTEXT_EXPERTS = """
**/*[mM]oe*/gate/kernel                           embed -
**/*[mM]oe*/gate/kernel                           embed - -
**/*[mM]oe*/wi_[01]                               expert embed mlp
**/*[mM]oe*/wi_[01]                               expert - embed mlp
**/*[mM]oe*/wo                                    expert mlp embed
**/*[mM]oe*/wo                                    expert - mlp embed
"""

_GEMMA_PYTORCH = """
**/*embedder.weight                               vocab embed
"""

_GPT2 = """
**/*attn.c_attn.weight                            embed q+k+v
**/*attn.c_attn.bias                              q+k+v
**/*crossattention.q_attn.weight                  embed heads
**/*crossattention.q_attn.bias                    heads
**/*crossattention.c_attn.weight                  embed k+v
**/*crossattention.c_attn.bias                    k+v
**/*attn.c_proj.weight                            heads embed
**/*crossattention.c_proj.weight                  heads embed
**/*mlp.c_fc.weight                               embed mlp
**/*mlp.c_fc.bias                                 mlp
**/*mlp.c_proj.weight                             mlp embed
**/*c_proj.bias                                   embed
**/*ln_*.weight                                   embed
**/*ln_*.bias                                     embed
**/*wte.weight                                    vocab embed
**/*wpe.weight                                    - embed
**/*lm_head.weight                                vocab embed
**/*attn.bias                                     - - - -
"""

_T5 = """
**/*Attention.[qkv].weight                        heads embed
**/*Attention.o.weight                            embed heads
**/*Attention.relative_attention_bias.weight      - heads
**/*DenseReluDense.wi*.weight                     mlp embed
**/*DenseReluDense.wo.weight                      embed mlp
**/*layer_norm.weight                             embed
**/*shared.weight                                 vocab embed
**/*embed_tokens.weight                           vocab embed
**/*lm_head.weight                                vocab embed
"""

_T5X = """
**/*attention/query/kernel                        embed heads
**/*attention/key/kernel                          embed heads
**/*attention/value/kernel                        embed heads
**/*attention/out/kernel                          heads embed
**/relpos_bias/rel_embedding                      heads -
**/mlp/wi*/kernel                                 embed mlp
**/mlp/wo/kernel                                  mlp embed
**/*norm/scale                                    embed
**/token_embedder/embedding                       vocab embed
**/logits_dense/kernel                            embed vocab
"""

FAMILIES = {
    "llama": (_HF_ATTENTION, _HF_MLP, _HF_ENDS, _META, _MAXTEXT),
    "mixtral": (
        _HF_ATTENTION,
        _HF_EXPERTS,
        _HF_MLP,
        _HF_ENDS,
        _MISTRAL_EXPERTS,
        _META,
        _MAXTEXT_EXPERTS,
        _MAXTEXT,
    ),
    "gemma": (_HF_ATTENTION, _HF_MLP, _HF_ENDS, _GEMMA_PYTORCH, _MAXTEXT),
    "gpt2": (_GPT2,),
    "t5": (_T5, _T5X),
}
"""The tables of each family, in order."""
