"""Published safetensors in, Orbax out: names, inventory, strict loading. Knows config and number formats only."""
