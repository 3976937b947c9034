"""Speech recognition: reading sound, one module per model family, timestamps, subtitles, word error rate.

model = load_speech(folder)                   any Whisper or Moonshine folder of transformers
model.transcribe("talk.mp3").text             a file, or samples at 16 kHz
for window in model.windows(sound): ...       text as it is found; memory does not grow with the sound
"""
