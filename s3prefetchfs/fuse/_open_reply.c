/*
 * Answers OPEN and OPENDIR with what pyfuse3 has no way to say: a backing file (nor has libfuse before 3.17), and that
 * the kernel may keep what it reads of a directory.
 *
 * Loaded with RTLD_GLOBAL before pyfuse3, so that the fuse_reply_open pyfuse3 calls is this one. The handler of an OPEN
 * says with s3prefetchfs_next_open() what the reply to it shall carry, and returns; pyfuse3 then replies at once, in
 * the same thread and with nothing between. So one slot is enough, and none is ever left behind: a reply about any
 * other handle goes to libfuse as it is.
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

struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

_Static_assert(sizeof(struct open_out) == 16, "struct fuse_open_out");

typedef int reply_open(fuse_req_t req, const struct fuse_file_info *fi);

static struct open_out next; /* for the next reply, if its open_flags are not 0 */

/* The next reply to OPEN or OPENDIR, if it is about the handle `fh`, carries these flags (FOPEN_*, not 0), and the
 * backing file `backing_id`, or 0. */
void s3prefetchfs_next_open(uint64_t fh, uint32_t open_flags, int32_t backing_id)
{
    next = (struct open_out){fh, open_flags, backing_id};
}

int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi)
{
    static reply_open *libfuse;
    struct open_out out = next;

    next.open_flags = 0;
    if (out.open_flags && out.fh == fi->fh)
        return fuse_reply_buf(req, (const char *)&out, sizeof out);
    if (!libfuse)
        libfuse = (reply_open *)dlsym(RTLD_NEXT, "fuse_reply_open");
    return libfuse ? libfuse(req, fi) : fuse_reply_err(req, ENOSYS);
}
