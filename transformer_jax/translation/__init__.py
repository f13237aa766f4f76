"""From text to text: search over a model's word pieces, in batches of few shapes."""
