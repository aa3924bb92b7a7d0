"""GPT-NeoX and Pythia, GPT-2 and Cerebras-GPT, GPT-J, OPT and Galactica."""

from dataclasses import replace

from chairlift.architectures.architecture import TOP, Architecture, GGUFFormat, Norms, Projections

GPT_NEOX = Architecture(
    name="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    models="GPT-NeoX-20B, Pythia, Dolly 2, RedPajama-INCITE",
    entries={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    gguf=GGUFFormat(
        names=("gptneox",),
        constants={"hidden_act": "gelu"},
        tensors={
            "attn_qkv": "attention.qkv_proj",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        top={**TOP, "output_norm": "model.final_layer_norm"},
    ),
    max_positions=2048,
    norm_eps="layer_norm_eps",
    rms_norm_eps=1e-5,
    biases=("attention_bias", True),
    mlp_bias=True,
    projections=Projections(
        qkv=("attention.query_key_value",),
        by_head=True,
        fused="attention.qkv_proj",
        output="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    norms=Norms(parallel="post_attention_layernorm", last="model.final_layer_norm"),
    rotary=0.25,
    centred=True,
    parallel=("use_parallel_residual", True),
    activation="gelu",
)
GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    models="GPT-2, DistilGPT2, Cerebras-GPT",
    entries={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
    },
    gguf=GGUFFormat(
        names=("gpt2",),
        constants={"hidden_act": "gelu_new"},
        tensors={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        top={**TOP, "position_embd": "model.wpe", "output_norm": "model.ln_f"},
    ),
    max_positions=1024,
    norm_eps="layer_norm_epsilon",
    rms_norm_eps=1e-5,
    tied=True,
    biases=("use_bias", True),
    projections=Projections(qkv=("attn.c_attn",), output="attn.c_proj", gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    norms=Norms(attention="ln_1", mlp="ln_2", last="model.ln_f"),
    positions="model.wpe",
    centred=True,
    activation="gelu_new",
)
GPTJ = replace(
    GPT2,
    name="GPTJForCausalLM",
    model_type="gptj",
    models="GPT-J-6B",
    gguf=None,
    tied=False,
    max_positions=2048,
    biases=None,
    mlp_bias=True,
    head_bias=True,
    projections=Projections(
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"), output="attn.out_proj", gate_up=("mlp.fc_in",), down="mlp.fc_out"
    ),
    norms=Norms(attention="ln_1", last="model.ln_f"),
    positions=None,
    rotary=0.25,
    adjacent_pairs=True,
    parallel=True,
)
OPT = Architecture(
    name="OPTForCausalLM",
    model_type="opt",
    models="OPT, Galactica",
    entries={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    max_positions=2048,
    norm_eps="layer_norm_eps",
    rms_norm_eps=1e-5,
    tied=True,
    biases=("enable_bias", True),
    projections=Projections(output="self_attn.out_proj", gate_up=("fc1",), down="fc2"),
    norms=Norms(attention="self_attn_layer_norm", mlp="final_layer_norm", last="model.final_layer_norm"),
    positions="model.embed_positions",
    unused_positions=2,
    centred=True,
    activation="relu",
)
