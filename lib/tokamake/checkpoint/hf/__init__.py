"""The format `hf`: Hugging Face's folder of config.json and weights."""
