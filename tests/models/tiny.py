"""Makes the tiny random-weight Llama that the real model servers load in the tests.

    python tests/models/tiny.py --hf DIR          config.json + tokenizer (vLLM, with --load-format dummy)
    python tests/models/tiny.py --gguf FILE       one file with weights (llama.cpp)

Nothing is downloaded: the tokenizer is trained on words made from a fixed seed, the weights are drawn from a
fixed seed. What the GGUF model writes is nonsense, but the same nonsense each time and always lower-case words: it
never ends by itself and never trips a server's output parser (see `write_gguf`). `--hidden` and `--layers` make a
slower model, for tests that need a long prefill.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
from dataclasses import dataclass
from pathlib import Path

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# One token each, so that a test can have a tool called: `logit_bias` on the first, and the server's own grammar
# writes the rest.
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
SPECIAL = [BOS, EOS, PAD, TOOL_CALL, TOOL_CALL_END]
TOOL_CALL_ID = SPECIAL.index(TOOL_CALL)

VOCABULARY = 2000
SPACE = "Ġ"  # how a byte-level vocabulary spells a blank
CONTEXT = 32768

# Every role and every tool of a request changes the prompt; the form of the tool calls is one that servers know.
CHAT_TEMPLATE = "".join(
    [
        "{% for tool in tools or [] %}[tool] {{ tool | tojson }}\n{% endfor %}",
        '{% if tools %}Call one: <tool_call>{"name": <name>, "arguments": <object>}</tool_call>\n{% endif %}',
        "{% for message in messages %}[{{ message.role }}] {% if message.content %}{{ message.content }}{% endif %}",
        "{% for call in message.tool_calls or [] %}",
        '<tool_call>{"name": "{{ call.function.name }}",',
        ' "arguments": {{ call.function.arguments | tojson }}}</tool_call>',
        "{% endfor %}\n{% endfor %}",
        "{% if add_generation_prompt %}[assistant] {% endif %}",
    ]
)


@dataclass(frozen=True)
class Shape:
    hidden: int = 64
    layers: int = 2
    heads: int = 2

    @property
    def feed_forward(self) -> int:
        return self.hidden * 2


def train_tokenizer():
    """A byte-level BPE: any UTF-8 text goes in, and any bytes can come out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    dice = random.Random(20)
    lexicon = ["".join(dice.choices(string.ascii_lowercase, k=dice.randint(2, 8))) for _ in range(2500)]
    lines = (" ".join(dice.choices(lexicon, k=30)) for _ in range(1500))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def write_hf(folder: Path, shape: Shape) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    files = {
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "config.json": ids
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": shape.hidden,
            "intermediate_size": shape.feed_forward,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "head_dim": shape.hidden // shape.heads,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))


def write_gguf(file: Path, shape: Shape) -> None:
    """Random weights, but for one thing: the first hidden dimension carries the same positive value from the
    embedding to the output, where it lifts the tokens that are lower-case words far above all others."""
    import gguf
    import numpy

    model = json.loads(train_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL)
    kinds |= dict.fromkeys((TOOL_CALL, TOOL_CALL_END), gguf.TokenType.USER_DEFINED)  # these show in the text
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]

    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("tiny-random")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    dice = numpy.random.default_rng(20)

    def noise(*size: int, scale: float = 0.05):
        return (dice.standard_normal(size) * scale).astype(numpy.float32)

    def into_residual(width: int):
        weights = noise(shape.hidden, width)
        weights[0, :] = 0
        return weights

    embedding = noise(len(tokens), shape.hidden)
    embedding[:, 0] = 0.2
    output = noise(len(tokens), shape.hidden, scale=0.3)
    output[:, 0] = [4 if re.fullmatch(f"{SPACE}?[a-z]+", token) else -4 for token in tokens]

    ones = numpy.ones(shape.hidden, dtype=numpy.float32)
    writer.add_tensor("token_embd.weight", embedding)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}"
        writer.add_tensor(f"{prefix}.attn_norm.weight", ones)
        for part in ("attn_q", "attn_k", "attn_v"):
            writer.add_tensor(f"{prefix}.{part}.weight", noise(shape.hidden, shape.hidden))
        writer.add_tensor(f"{prefix}.attn_output.weight", into_residual(shape.hidden))
        writer.add_tensor(f"{prefix}.ffn_norm.weight", ones)
        writer.add_tensor(f"{prefix}.ffn_gate.weight", noise(shape.feed_forward, shape.hidden))
        writer.add_tensor(f"{prefix}.ffn_up.weight", noise(shape.feed_forward, shape.hidden))
        writer.add_tensor(f"{prefix}.ffn_down.weight", into_residual(shape.feed_forward))
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, metavar="DIR")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    options = parser.parse_args()
    shape = Shape(options.hidden, options.layers, heads=max(2, options.hidden // 64))
    if options.hf:
        write_hf(options.hf, shape)
    if options.gguf:
        write_gguf(options.gguf, shape)


if __name__ == "__main__":
    main()
