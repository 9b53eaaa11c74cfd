"""OpenAI's request and response bodies, mapped to requests and outputs of this project."""
