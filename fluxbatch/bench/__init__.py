"""What this machine can do, and how near the job comes to it: one question a module, `bench WHAT` asks it.

Imports nothing heavy: `python -m fluxbatch bench` alone lists the questions.
"""

QUESTIONS = {
    "ceilings": "how fast are this model's matrix products, its attention, copies and codecs by themselves?",
    "stages": "what does each stage of the loaded model cost alone, per size and batch?",
    "headspace": "how fast is the GPU alone, one cached batch replayed?",
    "batch_sizes": "is what plan.batch_size=auto takes about as fast as the best of a sweep?",
    "end_to_end": "how near does the real job, files on disk, come to that?",
    "peers": "how fast is the same work with what a user could run instead, in the same process, in turns?",
    "host": "how many images a second does everything but the model keep up with?",
    "plan_scale": "what does a manifest of millions of rows take until its plan stands?",
    "startup": "how long from a process's start to its first image on disk, compiled at start or ahead of time?",
    "resume_scale": "how long does a job of 100,000 shards take to start again, and its folder to be asked for?",
    "cluster": "what would a thousand GPUs do to one run folder, and what would stragglers and failures cost?",
    "fidelity": "what does a precision, or a step cache, change in the embedded model's pictures?",
    "pipelines": "do both pipelines give equal bytes, and what does the overlap bring?",
}
