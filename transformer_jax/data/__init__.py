"""From text to batches of ids: sources, tokenizer, the store of token ids, the batch plan. No JAX below this point."""
