/*
 * Answers OPEN with a backing file, which pyfuse3 and libfuse before 3.17 have no way to say.
 *
 * Loaded with RTLD_GLOBAL before pyfuse3, so that the fuse_reply_open pyfuse3 calls is this one. The handler of an OPEN
 * says with s3prefetchfs_pass_next_open() what the reply to it shall carry, and returns; pyfuse3 then replies at
 * once, in the same thread and with nothing between. So one slot is enough, and none is ever left behind: a reply
 * about any other handle goes to libfuse as it is.
 *
 * The reply is struct fuse_open_out of the kernel's protocol (<linux/fuse.h>), written out here because the
 * headers of an older kernel call its last field padding. It goes out with fuse_reply_buf, so nothing depends on what
 * struct fuse_file_info has in which version of libfuse, but for `fh`, which all have in the same place.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 32

#include <dlfcn.h>
#include <errno.h>
#include <fuse3/fuse_lowlevel.h>
#include <stdint.h>

#define OPEN_NOFLUSH (1u << 5)     /* FOPEN_NOFLUSH, Linux 5.16: close() does not ask, there is nothing to write */
#define OPEN_PASSTHROUGH (1u << 7) /* FOPEN_PASSTHROUGH, Linux 6.9 */

struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

_Static_assert(sizeof(struct open_out) == 16, "struct fuse_open_out");

typedef int reply_open(fuse_req_t req, const struct fuse_file_info *fi);

static uint64_t passed_fh;
static int32_t passed_id; /* the kernel's ids begin at 1 */

/* The next reply to OPEN, if it is about the handle `fh`, names the backing file `backing_id`. */
void s3prefetchfs_pass_next_open(uint64_t fh, int32_t backing_id)
{
    passed_fh = fh;
    passed_id = backing_id;
}

int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi)
{
    static reply_open *libfuse;

    if (passed_id > 0 && passed_fh == fi->fh) {
        struct open_out out = {fi->fh, OPEN_PASSTHROUGH | OPEN_NOFLUSH, passed_id};
        passed_id = 0;
        return fuse_reply_buf(req, (const char *)&out, sizeof out);
    }
    passed_id = 0;
    if (!libfuse)
        libfuse = (reply_open *)dlsym(RTLD_NEXT, "fuse_reply_open");
    return libfuse ? libfuse(req, fi) : fuse_reply_err(req, ENOSYS);
}
