"""GGUF files, llama.cpp's, as Hugging Face folders: the weights, the sizes, the tokenizer and the chat template."""
