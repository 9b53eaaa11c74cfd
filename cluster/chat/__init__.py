"""Chats to prompts: messages checked, templates rendered in a process of their own."""
