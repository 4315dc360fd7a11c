"""A language model of a few thousand parameters and its tokenizer, written to disk like a real one.

It is a randomly initialised Qwen2 with a byte-level BPE tokenizer and a ChatML template that can
show tools and tool calls.
"""

from __future__ import annotations

from pathlib import Path

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "You may call tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "You may call tools: system user assistant tool What is plus? Count the digits of.",
    '{"type": "function", "function": {"name": "add", "description": "Add two numbers.",',
    '"parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "',
    '"the first number", "the second number", "a number"}, "required": ["a", "b"]}}}',
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
    '<tool_call>{"name": "double", "arguments": {"number": 7}}</tool_call>',
    '<tool_call>{"name": "digits", "arguments": {"number": 17}}</tool_call>',
    "I think the answer is 0 1 2 3 4 5 6 7 8 9 10 11 12. Let me see, hm.",
]
VOCABULARY_SIZE = 480
SEED = 7


def write_model(folder: Path) -> Path:
    """Write configuration, weights and tokenizer, as `from_pretrained` reads them."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def _tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(text, special=True) for text in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_TEMPLATE,
    )
