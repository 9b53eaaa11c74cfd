"""From a request to its updates, whoever asked and wherever the group runs."""
