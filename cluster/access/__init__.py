"""Who may use a server: addresses that are served, API keys, certificates."""
