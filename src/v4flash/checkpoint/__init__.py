"""Published safetensors in, Orbax out: names, inventory, strict loading.

Knows the model's structure, its configuration and number formats; nothing of text, decoding or devices.
"""
