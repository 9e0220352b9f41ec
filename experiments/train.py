r"""Trains a language model, or a draft that imitates a target.

  python experiments/train.py --config=config.json --data=stdlib \
    --eval_data=stdlib_held_out --num_steps=2000 --run_dir=run --out=model

  python experiments/train.py --config=small.json --target=model \
    --loss=forward_kl --data=stdlib --num_steps=4000 --run_dir=run2 --out=draft

  python experiments/train.py --head=eagle3 --depth=4 --target=model \
    --data=stdlib --num_steps=4000 --run_dir=run3 --out=head

The first trains on the next token of a text; the second, with --target, on
the target's law; the third a head that reads the hiddens of the target, which
stays as it is. What comes out is a folder for --target, --draft or --head of
generate.py.

A run keeps its checkpoints and its metrics (a JSON object per line) in
--run_dir. Started again with the same flags it goes on from the newest one, and
ends with the same bits as if it had never stopped.
"""

import sys

from absl import flags

from experiments import script, train_run
from experiments.train_config import FLAG_GROUPS, config_from_flags


def main(values: flags.FlagValues):
  report = train_run.run(config_from_flags(values))
  print(train_run.summary(report), file=sys.stderr)


if __name__ == '__main__':
  sys.exit(script.run_main(main, FLAG_GROUPS))
