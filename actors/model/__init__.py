"""The forward pass of DeepSeek sparse attention models and the loading of their checkpoints."""
