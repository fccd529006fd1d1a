# An environment in which both commands of README.md run, on a CPU or on the GPUs of the host.
#
#   docker build -t timelyfreeze .
#   docker run --rm timelyfreeze                            # ./run_train.sh --emulation.enable
#   docker run --rm timelyfreeze scripts/test.sh
FROM python:3.11-slim

# A compiler for torch.compile; git for the tests.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

WORKDIR /timelyfreeze
# The environment is made anew where these change, and not for each change of the code.
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY scripts scripts
COPY timelyfreeze timelyfreeze
COPY torchtitan torchtitan
RUN scripts/setup.sh dev

COPY . .
ENV NGPU=1
CMD ["./run_train.sh", "--emulation.enable"]
