"""Files of models: safetensors, GGUF and orbax, all in Hugging Face's terms.

`base` says what a reader delivers; one strict mapping turns it into parameters.
"""
