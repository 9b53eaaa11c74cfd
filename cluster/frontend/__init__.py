"""From what a person wrote to a request: prompts, templates, parameters, defaults."""
