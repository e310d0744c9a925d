# Sourced by every job on Aurora: loads the module on which tokamake is installed.
# `frameworks` has Python and torch for the GPUs (ALCF user guide, Aurora, "PyTorch"). Load it before
# you create the venv of tokamake (python -m venv --system-site-packages). Without the command
# `module`, this does nothing.
if type module >/dev/null 2>&1; then
    module load frameworks
fi
export http_proxy=http://proxy.alcf.anl.gov:3128 https_proxy=http://proxy.alcf.anl.gov:3128
export HTTP_PROXY=$http_proxy HTTPS_PROXY=$https_proxy no_proxy=localhost,127.0.0.1,.alcf.anl.gov
export http_proxy=http://proxy.alcf.anl.gov:3128 https_proxy=http://proxy.alcf.anl.gov:3128
export HTTP_PROXY=$http_proxy HTTPS_PROXY=$https_proxy no_proxy=localhost,127.0.0.1,.alcf.anl.gov
export http_proxy=http://proxy.alcf.anl.gov:3128 https_proxy=http://proxy.alcf.anl.gov:3128
export HTTP_PROXY=$http_proxy HTTPS_PROXY=$https_proxy no_proxy=localhost,127.0.0.1,.alcf.anl.gov
export http_proxy=http://proxy.alcf.anl.gov:3128 https_proxy=http://proxy.alcf.anl.gov:3128
export HTTP_PROXY=$http_proxy HTTPS_PROXY=$https_proxy no_proxy=localhost,127.0.0.1,.alcf.anl.gov
