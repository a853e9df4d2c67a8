"""Plain-torch, cache-less looped models: the truth that every test compares with.

configs     OuroReferenceConfig, RavenReferenceConfig: frozen, read from and written to Hugging Face JSON
blocks      RMSNorm, rotary embedding, causal attention, gated MLP, in Hugging Face's rounding order
looped      LoopedReference: begin / advance / readout, and forward / all_depths built on them
ouro, raven the two families; module names are the checkpoints' tensor names
checkpoint  load_checkpoint, save_checkpoint: config.json + model.safetensors
decode      greedy decoding by full recompute, and the one-forward check that is equivalent to it
tokenizer   the byte-level tokenizer of the tiny checkpoints; ChatML template shared with the demos
tiny        random checkpoints of every family, small enough for CPU tests

Imports torch and the standard library only, except `checkpoint` (safetensors) and `tokenizer` (tokenizers,
transformers, imported when used). Everything is differentiable: the demo models are trained with it.
"""
