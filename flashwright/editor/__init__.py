"""TL in an editor: functions of a text and a place in it, and a language server that calls them."""
