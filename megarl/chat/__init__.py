"""Chats as token ids: templates, tool calls, dialogues."""
