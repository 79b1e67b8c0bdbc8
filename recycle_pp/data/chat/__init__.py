"""Prepares conversations for training: tokenises them with a chat template, and packs them into samples.

recipe = ChatRecipe(Corpus.of(["chats.jsonl"], column="messages"), "models/qwen2", sequence=1024)
tokenise(recipe, Path("train.bin"))             # once, before the start of a job
"""
